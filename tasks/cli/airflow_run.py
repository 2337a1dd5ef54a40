"""Run the `retrain` DAG in a process of Airflow's own, and watch it: what `trainwright run JOB` does.

This process holds the run: its leases end when it does. The Airflow process and everything below it end with it too.
"""

from __future__ import annotations

import getpass
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainwright.infra import local
from trainwright.infra.process import dying_with_parent
from trainwright.tasks import step, steps
from trainwright.tasks.errors import (
    Interrupted,
    ServiceUnreachable,
    TrainwrightError,
    final_state,
    from_document,
)
from trainwright.tasks.leases.ledger import Heartbeat, Holder
from trainwright.tasks.runs.run import Run, replayed
from trainwright.tasks.settings import dags_folder, settings
from trainwright.tasks.spec.job import Job

GRACE_S = 3.5
Watcher = Callable[[dict[str, Any]], None]


def holder_name() -> str:
    """In whose name this process holds things."""
    return f"{getpass.getuser()}@{socket.gethostname()} pid {os.getpid()}"


def ensure_store(store: str) -> None:
    """Start the embedded S3 server, where the store is in it and it is not there."""
    config = settings()
    if store.startswith("s3://") and config.s3_endpoint is None:
        try:
            local.start_s3(config.home)
        except (OSError, TimeoutError) as error:
            raise ServiceUnreachable(
                f"S3 server: {error}", service="s3", address="127.0.0.1"
            ) from error


def run_job(job: Job, *, new: bool, replay: str | None, watch: Watcher) -> Run:
    """Run the whole chain for a job; the run, when it succeeded.

    Raises what the failing step raised, RunHeld where another works on the job, Interrupted on SIGINT or SIGTERM.
    """
    config = settings()
    ensure_store(config.store)
    if replay is not None:
        replay, new = replayed(replay, job), True
    name = holder_name()
    run = steps.open_for(job, Holder(name, os.getpid()), new=new)
    watch({"event": "run", "run": run.uri, "holder": name})
    try:
        with Heartbeat(step.ledger(), run.uri, [run.hold], holder=name):
            _airflow(run, replay, name, watch)
    except KeyboardInterrupt:
        error = Interrupted(f"interrupted; `trainwright run` goes on with {run.uri}", run=run.uri)
        error.run = run.uri
        run.note(state="interrupted", error=error.document())
        raise error from None
    except TrainwrightError as error:
        error.run = run.uri
        if (
            run.status().state == "running" and run.status().holder == name
        ):  # no step said why: Airflow itself ended
            run.note(state=final_state(error), error=error.document())
        raise
    finally:
        step.ledger().release(run.uri, holder=name)
    return run


def _airflow(run: Run, replay: str | None, holder: str, watch: Watcher) -> None:
    config = settings()
    with tempfile.TemporaryDirectory(prefix="trainwright-run-") as folder:
        progress = Path(folder) / "progress.jsonl"
        progress.touch(mode=0o600)
        watch({"event": "stage", "name": "airflow"})
        try:
            environment = local.airflow_environment(config.home, dags_folder())
            local.ensure_airflow_db(config.home, dags_folder())
        except (OSError, TimeoutError) as error:
            raise ServiceUnreachable(
                f"Airflow: {error}", service="airflow", address="this machine"
            ) from error
        environment |= {
            "TRAINWRIGHT_PROGRESS": str(progress),
            "TRAINWRIGHT_HOLDER": holder,
            "TRAINWRIGHT_HOLDER_PID": str(os.getpid()),
        }
        conf = json.dumps({"run": run.uri, "job": run.job_name, "replay": replay})
        log_path = run.work_folder() / "airflow.log"
        with log_path.open("ab") as log:
            process = subprocess.Popen(
                dying_with_parent([sys.executable, "-m", "trainwright.dags", conf]),
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                failed = _follow(process, progress, watch)
            except BaseException:
                _stop(process)
                raise
            finally:
                _kill_group(process)
        if (failed is not None or process.returncode != 0) and not run.finished():
            run.objects.put_file("logs/airflow.log", log_path)  # a sealed run takes nothing more
        if failed is not None:
            raise failed
        if process.returncode != 0:
            raise TrainwrightError(
                f"Airflow ended with {process.returncode}, and no step said why; its log is {log_path}"
            )


def _follow(
    process: subprocess.Popen[bytes], progress: Path, watch: Watcher
) -> TrainwrightError | None:
    """Hand on every event until the process ends; the error of the step that failed."""
    failed: TrainwrightError | None = None
    with progress.open() as lines:
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


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask the running step to stop (training saves a checkpoint), for as long as is polite."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=GRACE_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        return


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Whatever is left of it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()
