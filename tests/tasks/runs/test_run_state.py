"""The state of a run without a worker: killed in a step, or after its only requested step."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import doors
import pytest

from trainwright.tasks import progress
from trainwright.tasks.context import Reference, RunContext
from trainwright.tasks.errors import Interrupted, TrainingFailed, TrainwrightError
from trainwright.tasks.leases.ledger import Holder
from trainwright.tasks.runs.listing import Listing
from trainwright.tasks.runs.run import Run, open_run
from trainwright.tasks.spec.job import Job
from trainwright.tasks.summary import summary

JOB = {"name": "alone", "data": {"uri": "builtin:digits"}}
WORKER = """
import os, sys, time
from trainwright.tasks import chain
from trainwright.tasks.context import RunContext
from trainwright.tasks.leases.ledger import Holder
from trainwright.tasks.runs.run import Run
from trainwright.tasks.settings import Settings

def work(context):
    print("works", flush=True)
    time.sleep(600)

step = chain.StepSpec("train", chain.step("train").artefact, "__main__", "")
run = Run(sys.argv[1], Settings.from_environment())
chain.run_step(RunContext(run, Holder("worker", os.getpid())), step)
"""


def run_step(run: Run, work: Callable[[RunContext], Reference]) -> Reference:
    """Run a step whose work is this function."""
    return doors.run_work(doors.attach(run), work)


def opened(folder: Path, holder: Holder) -> Run:
    store = f"file://{folder / 'store'}"
    return open_run(Job.model_validate(JOB), doors.settings(), holder, store)


def shown(run: Run) -> tuple[str, str | None]:
    listing = Listing(run.store_uri, doors.settings())
    try:
        (row,) = listing.page(10).runs
    finally:
        listing.close()
    assert summary(run)["state"] == row.state
    return row.state, row.step


def test_a_run_whose_worker_is_killed_is_interrupted_and_can_continue(
    home: Path, tmp_path: Path
) -> None:
    run = opened(tmp_path, Holder("worker"))
    doors.ledger().release(run.uri)
    with subprocess.Popen(
        [sys.executable, "-c", WORKER, run.uri], stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "works\n"
        assert shown(run) == ("running", "train")
        worker.kill()
    assert shown(run) == ("interrupted", "train")
    again = opened(tmp_path, Holder("another", os.getpid()))
    assert again.uri == run.uri
    assert shown(run) == ("running", "train")


def test_a_steps_duration_includes_the_time_of_killed_processes(home: Path, tmp_path: Path) -> None:
    run = opened(tmp_path, Holder("one"))
    run_step(run, lambda _: {"duration_s": 100.0})
    assert run.status().steps == {"train": 100.0}
    run.note(steps={"train": 300.0})  # including failed attempts
    run_step(run, lambda _: {"duration_s": 100.0})
    assert 300.0 <= run.status().steps["train"] < 400.0


def test_a_step_raises_its_own_error_even_if_the_status_cannot_be_written(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[dict[str, Any]] = []
    progress.listen(heard.append)
    run = opened(tmp_path, Holder("one"))

    def work(context: RunContext) -> Reference:
        shutil.rmtree(tmp_path / "store")
        raise TrainingFailed("a cable came loose")

    with pytest.raises(TrainingFailed, match="a cable came loose"):
        run_step(run, work)
    assert heard[-1]["message"].startswith("can't record how train ended: ")
    assert doors.ledger().held() == []


@pytest.mark.parametrize(("file", "where"), [("/x/full", "/x/full"), (None, "work/alone/.* or /")])
def test_a_full_disk_on_this_machine_gives_one_line(
    home: Path, tmp_path: Path, file: str | None, where: str
) -> None:
    run = opened(tmp_path, Holder("one"))

    def work(context: RunContext) -> Reference:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file)

    with pytest.raises(
        TrainwrightError, match=f"train: can't write .*{where}.* .No space left.*; free some space"
    ):
        run_step(run, work)
    assert run.status().state == "failed"


def test_a_stopped_step_whose_process_fails_is_interrupted(home: Path, tmp_path: Path) -> None:
    run = opened(tmp_path, Holder("one"))

    def work(context: RunContext) -> Reference:
        context.stop.set()
        raise TrainwrightError("the measuring process exited with -15")

    with pytest.raises(Interrupted, match="train: stopped"):
        run_step(run, work)
    assert run.status().state == "interrupted"


def test_a_run_without_a_next_step_is_left(home: Path, tmp_path: Path) -> None:
    me = Holder("somebody's DAG")
    run = opened(tmp_path, me)
    doors.do(run, "validate", None)
    assert shown(run) == ("running", None)  # the next step may start soon
    assert doors.ledger().renew(run.uri, [run.hold], ttl_s=-1.0)  # a minute later
    assert shown(run) == ("left", None)


def test_a_run_stops_running_when_a_new_run_of_its_job_starts(home: Path, tmp_path: Path) -> None:
    first = opened(tmp_path, Holder("one"))
    first.note(step="train")
    assert doors.ledger().renew(first.uri, [first.hold], ttl_s=-1.0)
    second = open_run(
        Job.model_validate(JOB), doors.settings(), Holder("two"), first.store_uri, new=True
    )
    assert [summary(one)["state"] for one in (first, second)] == ["interrupted", "running"]


def test_without_the_runs_ledger_the_recorded_state_is_shown(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = opened(tmp_path, Holder("one"))
    monkeypatch.setenv("TRAINWRIGHT_HOME", str(tmp_path / "elsewhere"))
    assert shown(run)[0] == "running"
    monkeypatch.setenv("TRAINWRIGHT_LEDGER", "postgresql+psycopg://nobody@127.0.0.1:9/none")
    assert shown(run)[0] == "running"


def test_a_final_state_needs_no_ledger(home: Path, tmp_path: Path) -> None:
    run = opened(tmp_path, Holder("one"))
    doors.ledger().release(run.uri)
    run.work_folder()
    assert shown(run)[0] == "left"
    run.note(state="failed", step="train")
    assert shown(run) == ("failed", "train")
