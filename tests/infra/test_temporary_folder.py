"""A temporary folder is removed at its end, or by the next one if its process was killed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from trainwright.infra.temporary_folder import temporary_folder

HOLDS = (
    "from trainwright.infra.temporary_folder import temporary_folder\n"
    "with temporary_folder('case-') as folder:\n"
    "    (folder / 'rows').write_text('x')\n"
    "    print(folder, flush=True)\n"
    "    input()\n"
)


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_nothing_is_left_also_after_an_error(parent: Path) -> None:
    with pytest.raises(ValueError), temporary_folder("case-") as folder:  # noqa: PT012
        (folder / "file").write_text("x")
        assert folder.parent == parent
        raise ValueError
    assert list(parent.iterdir()) == []


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_uses_is_not(
    parent: Path,
) -> None:
    command = [sys.executable, "-c", HOLDS]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    held = Path(process.stdout.readline().strip())
    with temporary_folder("case-") as other:
        assert other != held
    assert (held / "rows").is_file()
    process.kill()
    process.communicate()
    assert held.is_dir()
    with temporary_folder("other-"):
        assert held.is_dir()
    with temporary_folder("case-") as other:
        assert [one for one in parent.iterdir() if one.is_dir()] == [other]
    assert list(parent.iterdir()) == []
