"""`trainwright run JOB`: runs the `retrain` DAG in an Airflow process, and follows it.

This process chooses the DAG run's name and opens the run with that name as the holder, so that
every task works for the same holder, as under a scheduler. When this process ends, so do its
holds, the Airflow process and the training process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainwright.infra import local
from trainwright.infra.process import dying_with_parent
from trainwright.tasks import progress
from trainwright.tasks.chain import PROGRESS
from trainwright.tasks.context import RunContext
from trainwright.tasks.errors import (
    Interrupted,
    ServiceUnreachable,
    TrainwrightError,
    final_state,
    from_document,
)
from trainwright.tasks.leases.ledger import Heartbeat, Holder
from trainwright.tasks.leases.tables import dag_run_holder
from trainwright.tasks.runs.run import Run, replayed
from trainwright.tasks.settings import Settings, dags_folder
from trainwright.tasks.spec.job import Job
from trainwright.tasks.train.launcher import background

Watcher = Callable[[dict[str, Any]], None]
DAG = "retrain"


def ensure_store(store: str, settings: Settings) -> None:
    """Start the embedded S3 server if the store is in it and it does not run."""
    if store.startswith("s3://") and settings.s3_endpoint is None:
        try:
            local.start_s3(settings.home)
        except (OSError, TimeoutError) as error:
            raise ServiceUnreachable(
                f"S3 server: {error}", service="s3", address="127.0.0.1"
            ) from error


@contextlib.contextmanager
def supervised_store(store: str, settings: Settings) -> Iterator[None]:
    """Start the embedded S3 server if the store is in it, and restart it if it ends meanwhile.

    A restart is told by a notice.
    """
    ensure_store(store, settings)
    if not store.startswith("s3://") or settings.s3_endpoint is not None:
        yield
        return

    def tell(line: str) -> None:
        progress.emit("notice", message=line)

    with local.supervised(local.Supervisor(settings.home, tell)):
        yield


def run_job(job: Job, settings: Settings, *, new: bool, replay: str | None, watch: Watcher) -> Run:
    """Run the whole chain for a job. Returns the run after it succeeded.

    Raises the failing step's error, RunHeld if another process works on the job, Interrupted on
    SIGINT or SIGTERM.
    """
    with supervised_store(settings.store, settings):
        return _run_job(job, settings, new=new, replay=replay, watch=watch)


def _run_job(job: Job, settings: Settings, *, new: bool, replay: str | None, watch: Watcher) -> Run:
    if replay is not None:
        replay, new = replayed(replay, job, settings), True
    moment = datetime.now(UTC)
    holder = Holder(dag_run_holder(DAG, f"manual__{moment.isoformat()}"), os.getpid())
    context = RunContext.open(job, settings, holder, new=new)
    run, name = context.run, holder.name
    watch({"event": "run", "run": run.uri, "holder": name})
    try:
        with Heartbeat(context.ledger, run.uri, [run.hold], holder=name):
            _airflow(context, replay, moment, watch)
    except KeyboardInterrupt:
        _stop_training(context)
        error = Interrupted(f"interrupted; `trainwright run` continues {run.uri}", run=run.uri)
        error.run = run.uri
        run.note(state="interrupted", error=error.document())
        raise error from None
    except TrainwrightError as error:
        error.run = run.uri
        # Airflow may have ended without stopping the training. The training ends with this process
        # anyway, so an unreachable service does not matter here.
        with contextlib.suppress(ServiceUnreachable):
            _stop_training(context)
        status = run.status()
        if status.state == "running" and status.holder == name:  # no step reported why
            run.note(state=final_state(error), error=error.document())
        raise
    finally:
        context.ledger.release(run.uri, holder=name)
    return run


def _stop_training(context: RunContext) -> None:
    """Stop the training process, if one works for this holder. Its checkpoint stays."""
    if background.launcher(context.run) is not None:
        background.stop_unfollowed(context)


def _airflow(context: RunContext, replay: str | None, moment: datetime, watch: Watcher) -> None:
    run, settings = context.run, context.settings
    watch({"event": "stage", "name": "airflow"})
    try:
        environment = local.airflow_environment(settings.home, dags_folder())
        local.ensure_airflow_db(settings.home, dags_folder())
    except (OSError, TimeoutError) as error:
        raise ServiceUnreachable(
            f"Airflow: {error}", service="airflow", address="this machine"
        ) from error
    conf = {"run": run.uri, "job": run.job_name, "replay": replay}
    command = [sys.executable, "-m", "trainwright.dags", moment.isoformat(), json.dumps(conf)]
    work = run.work_folder()
    events, log_path = work / PROGRESS, work / "airflow.log"
    events.write_bytes(b"")
    try:
        with log_path.open("ab") as log:
            process = subprocess.Popen(
                dying_with_parent(command),
                env=settings.environment() | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                failed = _follow(process, run, watch)
            finally:
                _kill_group(process)
    finally:
        events.unlink(missing_ok=True)
    if (failed is not None or process.returncode != 0) and not run.finished():
        run.objects.put_file("logs/airflow.log", log_path)  # a sealed run is not changed
    if failed is not None:
        raise failed
    if process.returncode != 0:
        raise before_the_first_task(log_path) or TrainwrightError(
            f"Airflow exited with {process.returncode}, and no step reported an error; "
            f"its log is {log_path}"
        )


def before_the_first_task(log: Path) -> TrainwrightError | None:
    """The error with which `trainwright.dags` ended, if it is the log's last line."""
    last = log.read_text(errors="replace").rstrip().rpartition("\n")[2]
    with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
        return from_document(json.loads(last)["error"])
    return None


def _follow(process: subprocess.Popen[bytes], run: Run, watch: Watcher) -> TrainwrightError | None:
    """Pass each event to `watch` until the process ends. Returns the error of a failed step."""
    failed: TrainwrightError | None = None
    with (run.work_folder() / PROGRESS).open() as lines:
        part = ""
        while True:
            ended = process.poll() is not None
            for line in lines:
                part += line
                if not part.endswith("\n"):
                    continue  # the rest of the line is still being written
                event, part = json.loads(part), ""
                if event["event"] == "step" and event["state"] == "failed" and failed is None:
                    failed = from_document(event["error"])
                watch(event)
            if ended:
                return failed
            time.sleep(0.1)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the Airflow process and all that it started, except the training process."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
