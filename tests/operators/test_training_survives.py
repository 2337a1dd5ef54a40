"""A training outlives its task: real processes are killed. A worker here runs TrainOperator."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import doors
import psutil
import pytest
from airflow_whole import write_job

from trainwright.tasks.context import RunContext
from trainwright.tasks.errors import Interrupted
from trainwright.tasks.leases.ledger import Holder
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.runs.run import Run
from trainwright.tasks.spec.job import load_job
from trainwright.tasks.train.checkpoint import files
from trainwright.tasks.train.launcher import background

OWNER = "Airflow survival r1"
EVERY = 10
WORKER = """
import sys
from types import SimpleNamespace
from trainwright.operators import TrainOperator
context = {"dag_run": SimpleNamespace(dag_id="survival", run_id="r1")}
task = TrainOperator(task_id="train", run=sys.argv[1], deferrable=False)
print(task.execute(context), flush=True)
"""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def until(what: str, test: Callable[[], Any], seconds: float = 300) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := test()):
        assert time.monotonic() < deadline, f"not in {seconds:g} s: {what}"
        time.sleep(0.1)
    return found


def processes(run: Run, module: str) -> list[psutil.Process]:
    """The living processes that run this module for this run."""
    found = []
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
            if (
                module in line
                and (run.uri in line or run.id in line)
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
        except psutil.Error:
            continue
    return found


def ranks(run: Run) -> list[psutil.Process]:
    return processes(run, "trainwright.tasks.train.worker.entry")


def newest(run: Run) -> int:
    states = files.list_states(run.objects)
    return states[-1].step if states else 0


@pytest.fixture
def run(stack: Path, tmp_path: Path) -> Iterator[Run]:
    """A run with a plan and devices, whose training takes minutes."""
    job = write_job(tmp_path, "survivor", 2000)
    run = doors.open_for(
        load_job(job), Holder(OWNER), store=(tmp_path / "store").as_uri(), new=True
    )
    try:
        yield run
    finally:
        background.stop(attached(run))


def attached(run: Run, holder: str = OWNER) -> RunContext:
    return RunContext.attach(run, holder)


def start_worker(run: Run) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, run.uri], stdout=subprocess.PIPE, text=True
    )


def test_a_retry_attaches_after_a_killed_worker_and_resumes_after_a_killed_launcher(
    run: Run,
) -> None:
    first = start_worker(run)
    until("training", lambda: newest(run) >= EVERY, 500)
    launcher, started = (
        background.launcher(run),
        len(processes(run, "trainwright.tasks.train.launcher.background")),
    )
    assert started == 1
    first.kill()
    first.wait()
    relayed_ns, reached = (run.work_folder() / "relayed.json").stat().st_mtime_ns, newest(run)
    second = start_worker(run)
    until(
        "the second follows",
        lambda: (run.work_folder() / "relayed.json").stat().st_mtime_ns > relayed_ns,
    )
    until("training goes on", lambda: newest(run) > reached + EVERY)
    assert background.launcher(run) == launcher
    assert len(processes(run, "trainwright.tasks.train.launcher.background")) == 1

    (process,) = processes(run, "trainwright.tasks.train.launcher.background")
    reached = newest(run)
    process.kill()
    until("no rank is left", lambda: not ranks(run), 60)
    assert second.wait(300) != 0  # Interrupted, which a retry continues
    with pytest.raises(Interrupted, match="the training process was killed"):
        background.raise_failure(run)
    assert doors.ledger().held("device ") == []
    third = start_worker(run)
    until("training has gone on", lambda: newest(run) > reached)
    assert background.launcher(run) not in (None, launcher)
    assert len(processes(run, "trainwright.tasks.train.launcher.background")) == 1
    third.send_signal(signal.SIGKILL)
    third.wait()

    assert background.stop(attached(run))
    until(
        "no process is left",
        lambda: (
            not processes(run, "trainwright.tasks.train.launcher.background") and not ranks(run)
        ),
        60,
    )
    assert doors.ledger().held() == []
    assert run.status().state == "interrupted"
    assert newest(run) > reached


def test_only_one_of_two_concurrent_launchers_trains(run: Run) -> None:
    doors.do(run, "allocate")
    command = [sys.executable, "-m", "trainwright.tasks.train.launcher.background", run.uri, OWNER]
    both = [subprocess.Popen(command, start_new_session=True) for _ in range(2)]
    until("one gave way", lambda: any(one.poll() is not None for one in both))
    assert [one.poll() for one in both if one.poll() is not None] == [0]
    until("the other trains", lambda: newest(run) >= EVERY, 500)
    numbers = {
        process.cmdline()[-1] for process in ranks(run)
    }  # a rank may have a separate process that writes its checkpoints
    assert numbers - {"spare"} == {str(number) for number in range(len(run.read(Plan).devices))}
    alive = next(one for one in both if one.poll() is None)
    assert background.stop_unfollowed(attached(run))
    assert ranks(run) == []
    assert alive.wait(60) == 130
    assert doors.ledger().held() == []


def launch(run: Run) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "trainwright.tasks.train.launcher.background", run.uri, OWNER],
        start_new_session=True,
    )


def left_after(stops: list[Callable[[RunContext], bool]], run: Run) -> list[list[psutil.Process]]:
    """The remaining ranks when each of several concurrent stops (trigger, teardown) returns."""

    def left(stop: Callable[[RunContext], bool]) -> list[psutil.Process]:
        stop(attached(run))
        return ranks(run)

    with ThreadPoolExecutor(len(stops)) as stoppers:
        return list(stoppers.map(left, stops))


def stop_late(context: RunContext) -> bool:
    """Stop it just after another process took its right to launch."""
    until("another stops it", lambda: background.launcher(context.run) is None)
    return background.stop(context)


def of_run(run: Run) -> dict[str, int]:
    return {lease.resource: lease.token for lease in doors.ledger().held() if lease.run == run.uri}


def test_a_launcher_that_slept_past_its_lease_does_not_disturb_its_successor(run: Run) -> None:
    doors.do(run, "allocate")
    sleeper = launch(run)
    until("training", lambda: newest(run) >= EVERY, 500)
    os.kill(sleeper.pid, signal.SIGSTOP)
    doors.ledger().renew(run.uri, of_run(run), ttl_s=0)  # like a minute later
    reached = newest(run)
    successor = launch(run)
    until("the successor trains", lambda: newest(run) > reached, 500)
    held = of_run(run)
    os.kill(sleeper.pid, signal.SIGCONT)
    assert sleeper.wait(120) != 0
    assert {name: token for name, token in of_run(run).items() if name.startswith("device ")} == {
        name: token for name, token in held.items() if name.startswith("device ")
    }
    assert of_run(run).keys() == held.keys()
    assert (run.status().state, run.status().error) == ("running", None)
    reached = newest(run)
    until("the successor still trains", lambda: newest(run) > reached)
    assert not background.stop_unfollowed(
        attached(run, "Airflow survival r2")
    )  # the teardown of a DAG run that does not hold this run
    assert successor.poll() is None
    assert left_after([background.stop, background.stop], run) == [[], []]
    assert successor.wait(60) == 130
    assert of_run(run) == {}


def test_a_remote_launcher_saves_a_checkpoint_and_ends_before_its_devices_are_free(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    doors.do(run, "allocate")
    process = launch(run)
    until("training", lambda: newest(run) >= EVERY, 500)
    with monkeypatch.context() as patch:
        patch.setattr(
            socket, "gethostname", lambda: "another-machine"
        )  # that machine can use only the ledger
        assert left_after([background.stop, background.stop_unfollowed, stop_late], run) == [
            [],
            [],
            [],
        ]
    assert process.wait(60) == 130
    assert of_run(run) == {}
    status = run.status()
    assert status.state == "interrupted"
    assert f"stopped after step {newest(run)}; its checkpoint is kept" in str(status.error)
