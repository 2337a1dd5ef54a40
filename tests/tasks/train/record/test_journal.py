"""The step journal: whichever ranks are killed, each rank has each step exactly once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from trainwright.tasks.train.record.journal import Journals, StepJournal, segment_path

DEVICES = ["here/0", "here/1"]
ALL = 10**7


def last_of(step: int, members: list[int]) -> dict[str, Any]:
    """The last finished step before `step`, as every member saw it."""
    return {"row": {"step": step - 1, "loss": 0.5}, "parts": [8, 4], "members": members}


def steps(work: Path, rank: int) -> list[int]:
    return [
        row["step"]
        for name, rows in Journals(work).parts(ALL)
        if name.startswith(f"steps-rank{rank}-")
        for row in rows
    ]


def test_the_replacement_of_a_killed_rank_continues_after_its_complete_rows(tmp_path: Path) -> None:
    killed = StepJournal(tmp_path, 1)
    for step in range(4):
        killed.add(step=step, loss=1 / (step + 3))
    with segment_path(tmp_path, 1, 0).open("a") as file:
        file.write('{"step": 4, "lo')  # an incomplete line
    journals = Journals(tmp_path)
    journals.align(3, None, DEVICES, lambda: 0)
    after = StepJournal(tmp_path, 1)
    after.add(step=3, loss=0.5)
    assert journals.parts(ALL) == [
        ("steps-rank1-00000000", [{"step": step, "loss": 1 / (step + 3)} for step in range(3)]),
        ("steps-rank1-00000003", [{"step": 3, "loss": 0.5}]),
    ]


def test_a_member_lost_before_it_recorded_the_last_step_gets_a_row_without_figures(
    tmp_path: Path,
) -> None:
    for rank, rows in ((0, 3), (1, 2)):
        journal = StepJournal(tmp_path, rank)
        for step in range(rows):
            journal.add(step=step)
    journals = Journals(tmp_path)
    journals.align(3, last_of(3, [0, 1]), DEVICES, lambda: 0)
    assert [steps(tmp_path, rank) for rank in (0, 1)] == [[0, 1, 2]] * 2
    (row,) = dict(journals.parts(ALL))["steps-rank1-00000002"]
    assert (row["rank"], row["device"], row["batch_size"]) == (1, "here/1", 4)
    assert (row["loss"], row["compute_s"], row["energy_j"]) == (0.5, 0.0, None)


def test_a_row_that_was_uploaded_is_not_added_again(tmp_path: Path) -> None:
    Journals(tmp_path).align(3, last_of(3, [0, 1]), DEVICES, lambda: 3)
    assert Journals(tmp_path).parts(ALL) == []


@given(
    cuts=st.lists(st.sets(st.integers(0, 12)), min_size=2, max_size=2),
    ahead=st.lists(st.integers(0, 1), min_size=2, max_size=2),
    agreed=st.integers(1, 12),
    committed=st.integers(0, 12),
    torn=st.booleans(),
)
def test_after_alignment_all_ranks_have_each_step_once_wherever_they_ended(
    tmp_path_factory: Any,
    cuts: list[set[int]],
    ahead: list[int],
    agreed: int,
    committed: int,
    torn: bool,
) -> None:
    committed, work = min(committed, agreed), tmp_path_factory.mktemp("work")
    journals = Journals(work)
    for rank in (0, 1):
        journal = StepJournal(work, rank)
        for step in range(agreed - ahead[rank] + (1 - ahead[rank])):  # one less, or one more
            if step in cuts[rank] or step == committed:
                journal.cut()
            journal.add(step=step)
        if torn and (path := next(iter(work.glob(f"journal/steps-rank{rank}-*")), None)):
            with path.open("a") as file:
                file.write('{"step"')
    journals.drop(committed)
    journals.align(agreed, last_of(agreed, [0, 1]), DEVICES, lambda: committed)
    for rank in (0, 1):
        StepJournal(work, rank).add(step=agreed)
        assert steps(work, rank) == list(range(committed, agreed + 1))
