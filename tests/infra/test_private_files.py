"""Files that only their owner may read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import doors
import pytest
from finished_run import finished_training

from trainwright.infra.private_files import write_private
from trainwright.tasks.context import RunContext
from trainwright.tasks.leases.ledger import Holder
from trainwright.tasks.store import work as store


@pytest.fixture
def _umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("_umask")
def test_home_ledger_work_folders_and_stores_are_their_owners_whatever_the_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, kept = tmp_path / "some" / "home", tmp_path / "deep" / "store"
    monkeypatch.setenv("TRAINWRIGHT_HOME", str(home))
    run = finished_training(kept.as_uri())
    store(RunContext(run, Holder("me")))
    doors.ledger().take(["device a"], Holder("me"), run.uri)
    run.work_folder()
    for path in (home, kept, *home.rglob("*"), *kept.rglob("*")):
        mode = path.stat().st_mode & 0o777
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_a_private_file_is_readable_only_by_its_owner_and_is_replaced_atomically(
    tmp_path: Path,
) -> None:
    os.umask(0o022)
    write_private(tmp_path / "keys", "one")
    write_private(tmp_path / "keys", "two")
    assert (tmp_path / "keys").read_text() == "two"
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["keys"]
