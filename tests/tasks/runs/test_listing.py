"""The list of runs: which rows are cached, and which are read again."""

from __future__ import annotations

from pathlib import Path

import doors
import pytest
from finished_run import begin_run, finished_training, write_outcome
from plans import TWO, plan

from trainwright.tasks.errors import BadInput
from trainwright.tasks.leases.ledger import Holder, Ledger
from trainwright.tasks.runs import listing
from trainwright.tasks.runs.listing import Listing, RunRow, row_of
from trainwright.tasks.runs.run import Run


def found(run: Run) -> RunRow:
    row = row_of(run)
    assert row is not None
    return row


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that may change expire at once."""
    monkeypatch.setattr(listing, "FRESH_S", -1.0)
    monkeypatch.setattr(listing, "ENDED_FRESH_S", -1.0)


@pytest.mark.usefixtures("always")
def test_a_run_is_listed_with_its_current_state(
    tmp_path: Path,
) -> None:
    store = tmp_path.as_uri()
    found = Listing(store, doors.settings())
    assert found.page(10).runs == []
    run = begin_run(store, "small", 1)
    assert [row.state for row in found.page(10).runs] == ["running"]
    run.note(step="train")
    assert [row.step for row in found.page(10).runs] == ["train"]
    finished_training(store, "small", 1).note(state="failed")
    (row,) = found.page(10).runs
    assert (row.state, row.duration_s) == ("failed", 20.0)
    run.note(state="running")
    assert [row.state for row in found.page(10).runs] == ["running"]
    found.close()


@pytest.mark.parametrize(
    ("target", "leads"),
    [(None, "accuracy"), ({"metric": "log_loss", "value": 0.3}, "log_loss")],
)
def test_the_jobs_target_leads_a_rows_metrics(
    tmp_path: Path, target: dict[str, object] | None, leads: str
) -> None:
    run = begin_run(tmp_path.as_uri(), "small", 1, target=target)
    assert found(run).leading_metric is None
    write_outcome(run, metrics={"accuracy": 0.9, "loss": 0.2, "log_loss": 0.25})
    assert found(run).leading_metric == leads
    run.objects.put("job.json", b"{")  # the metrics are there all the same
    assert found(run).leading_metric == "accuracy"


@pytest.mark.usefixtures("always")
def test_other_folders_and_a_run_that_is_being_created_are_not_listed(
    tmp_path: Path,
) -> None:
    store = tmp_path.as_uri()
    begin_run(store, "small", 2)
    for name in (
        "small/notes",
        "<script>/20260101T000001Z-abcdef",
        "small/20260101T000001Z-abcdef",
    ):
        (tmp_path / "runs" / name).mkdir(parents=True)
    found = Listing(store, doors.settings())
    assert [row.id for row in found.page(10).runs] == ["20260101T000002Z-abcdef"]
    found.close()


def test_the_callers_settings_determine_which_ledger_is_asked(tmp_path: Path, home: Path) -> None:
    run = begin_run(tmp_path.as_uri(), "small", 1)
    run.note(step="train")
    run.work_folder()  # this machine worked on it, but its own ledger has no holder
    theirs = doors.settings().replaced(
        {"TRAINWRIGHT_LEDGER": f"sqlite:///{tmp_path / 'elsewhere.sqlite'}"}
    )
    Ledger(theirs.ledger_url).take([run.hold], Holder("somebody"), run.uri)
    found = Listing(tmp_path.as_uri(), theirs)
    assert [row.state for row in found.page(10).runs] == ["running"]
    found.close()
    found = Listing(tmp_path.as_uri(), doors.settings())
    assert [row.state for row in found.page(10).runs] == ["interrupted"]
    found.close()


def test_a_stopped_run_still_shows_its_prediction(tmp_path: Path) -> None:
    run = begin_run(tmp_path.as_uri(), "small", 1)
    run.note(state="interrupted", step="train")
    planned = plan(TWO)
    run.write(planned)
    found = Listing(tmp_path.as_uri(), doors.settings())
    row = found.page(10).runs[0]
    found.close()
    assert planned.predicted is not None
    assert (row.state, row.predicted_duration_s) == ("interrupted", planned.predicted.duration_s)
    assert row.devices == len(planned.devices)


def test_runs_created_at_the_same_time_are_each_listed_once(tmp_path: Path) -> None:
    for job in ("a", "b", "c"):
        begin_run(tmp_path.as_uri(), job, 1)
    found, seen, after = Listing(tmp_path.as_uri(), doors.settings()), [], None
    while True:
        page = found.page(1, after)
        seen += [row.job for row in page.runs]
        after = page.next
        if after is None:
            break
    assert seen == ["c", "b", "a"]
    with pytest.raises(BadInput, match="after: got"):
        found.page(1, "../../etc")
    found.close()
