"""Files that only their owner may read."""

from __future__ import annotations

import os
from pathlib import Path

from trainwright.infra.private_files import write_private


def test_a_private_file_is_readable_only_by_its_owner_and_is_replaced_atomically(
    tmp_path: Path,
) -> None:
    os.umask(0o022)
    write_private(tmp_path / "keys", "one")
    write_private(tmp_path / "keys", "two")
    assert (tmp_path / "keys").read_text() == "two"
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["keys"]
