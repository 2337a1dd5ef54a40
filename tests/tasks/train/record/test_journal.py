from __future__ import annotations

from pathlib import Path

from trainwright.tasks.storage.folder import FolderStore
from trainwright.tasks.train.record.journal import FOLDER, journal_of
from trainwright.tasks.train.record.metrics import Rows, read_rows


def test_the_replacement_of_a_killed_rank_finds_its_whole_rows(tmp_path: Path) -> None:
    store, journal = FolderStore(tmp_path / "run"), journal_of(tmp_path, 1)
    killed = Rows(store, "steps-rank1", journal)
    for step in range(4):
        killed.add(step=step, loss=1 / (step + 3))
    with (tmp_path / FOLDER / "steps-rank1.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # cut short
    after = Rows(store, "steps-rank1", journal)
    after.recover()
    after.forget_from(3)
    after.add(step=3, loss=0.5)
    after.write()
    assert read_rows(store, "steps-rank1") == [
        *({"step": step, "loss": 1 / (step + 3)} for step in range(3)),
        {"step": 3, "loss": 0.5},
    ]
    third = Rows(store, "steps-rank1", journal)
    third.recover()
    assert (third.waiting, third.newest) == ([], 3)
