"""Reading what a run has recorded so far: uploaded parts and local rows as one stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finished_run import begin_run, store_journals, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.tasks.runs.run import Run
from trainwright.tasks.train.record import events
from trainwright.tasks.train.record.journal import Journals, StepJournal, segment_path
from trainwright.tasks.train.record.live import Parts, happened, recorded


def _row(step: int, rank: int, loss: float = 1.0) -> dict[str, Any]:
    return {
        "step": step,
        "epoch": 0,
        "rank": rank,
        "batch_size": 8,
        "loss": loss,
        "learning_rate": 0.1,
        "step_time_s": 0.1,
    }


def _begun(home: Path) -> Run:
    return begin_run(f"file://{home / 'store'}", "small", 1)


def _journals(run: Run, ranks: int) -> list[StepJournal]:
    return [StepJournal(run.work_path, rank) for rank in range(ranks)]


def test_each_row_appears_once_whether_it_is_uploaded_or_not(home: Path) -> None:
    run = _begun(home)
    journals = _journals(run, 2)
    for step in range(10):
        for rank, journal in enumerate(journals):
            journal.add(**_row(step, rank))
        if step == 5:
            store_journals(run, journals)
    found = recorded(run, Parts())
    assert [(row["step"], row["rank"]) for row in found["rows"]] == [
        (step, rank) for step in range(10) for rank in (0, 1)
    ]
    assert found["next_step"] == 10
    stored = recorded(run, Parts(), running=False)
    assert {row["step"] for row in stored["rows"]} == set(range(6))


def test_the_row_of_a_repeated_step_replaces_the_earlier_one(home: Path) -> None:
    run = _begun(home)
    (journal,) = _journals(run, 1)
    for step in range(6):
        journal.add(**_row(step, 0, loss=1.0))
    store_journals(run, [journal])
    Journals(run.work_path).align(3, None, ["cpu"], lambda: 0)
    for step in range(3, 5):
        journal.add(**_row(step, 0, loss=2.0))
    found = recorded(run, Parts())
    assert [row["loss"] for row in found["rows"]][:5] == [1.0, 1.0, 1.0, 2.0, 2.0]


def test_an_incomplete_line_is_not_read(home: Path) -> None:
    run = _begun(home)
    (journal,) = _journals(run, 1)
    journal.add(**_row(0, 0))
    with segment_path(run.work_path, 0, 0).open("a") as file:
        file.write('{"step": 1, "ra')
    assert [row["step"] for row in recorded(run, Parts())["rows"]] == [0]


@settings(max_examples=25, deadline=None)
@given(
    steps=st.integers(0, 120),
    ranks=st.integers(1, 5),
    every=st.integers(1, 40),
    first=st.integers(0, 130),
    most=st.integers(1, 300),
)
def test_charts_get_the_same_rows_for_any_division_into_parts(
    tmp_path_factory: Any, steps: int, ranks: int, every: int, first: int, most: int
) -> None:
    run = begin_run(f"file://{tmp_path_factory.mktemp('store')}", "small", 1)
    for rank in range(ranks):
        rows: list[dict[str, Any]] = []
        for step in range(steps):
            rows.append(_row(step, rank))
            if step % every == 0 or step == steps - 1:
                write_rows(run, f"steps-rank{rank}", rows)
                rows = []
    whole = recorded(run, Parts(), most=most)
    assert whole["stride"] * most >= steps * ranks  # at most `most` rows
    wanted = [(step, rank) for step in range(0, steps, whole["stride"]) for rank in range(ranks)]
    assert [(row["step"], row["rank"]) for row in whole["rows"]] == wanted
    rest = recorded(run, Parts(), first, most=most)
    assert [(row["step"], row["rank"]) for row in rest["rows"]] == [
        key for key in wanted if key[0] >= first
    ]
    assert rest["newest"] == whole["newest"]


def test_events_are_recorded_with_their_time_and_other_progress_is_not(home: Path) -> None:
    run = _begun(home)
    record = events.EventRecorder(run.work_path)
    record(
        {"event": "world", "generation": 2, "ranks": [0], "reason": "rank 1 (here/cpu-1) was lost"}
    )
    record({"event": "train", "step": 3})
    with (run.work_path / events.KEY).open("a") as file:
        file.write('{"at": "2026')
    (event,) = happened(run)
    assert event["reason"] == "rank 1 (here/cpu-1) was lost"
    assert event["at"]
    assert happened(run, running=False) == []
    run.objects.put_file(events.KEY, run.work_path / events.KEY)
    assert happened(run, running=False) == [event]
