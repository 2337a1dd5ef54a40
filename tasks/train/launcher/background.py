"""Train in a process of its own, which outlives whoever started it: followed, attached to again, or stopped from anywhere.

`python -m trainwright.tasks.train.launcher.background RUN HOLDER [REPLAY]` takes the right to launch this run (a
lease that ends with the process), so that there is never a second one, and trains
from the newest checkpoint. Who takes that lease from it stops it.
How it ended is in the run's folder: result.json, or the error in status.json.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time

from trainwright.infra.airflow import training_service
from trainwright.tasks import step, steps
from trainwright.tasks.errors import (
    BadInput,
    Interrupted,
    RunHeld,
    ServiceUnreachable,
    TrainwrightError,
    from_document,
)
from trainwright.tasks.leases.launch_right import host_of, on_this_machine, own_name, resource
from trainwright.tasks.leases.ledger import Holder
from trainwright.tasks.runs.artefacts import Result
from trainwright.tasks.runs.run import Run
from trainwright.tasks.settings import settings

START_TIMEOUT_S = 120.0
LOOK_EVERY_S = 1.0
GRACE_S = 7.0
"""once it is told to stop: for the ranks' last step and checkpoint; whoever ends a task has its ranks gone in 10 s"""
_LOGS = "logs"
_log = logging.getLogger("trainwright")


def launcher(run: Run) -> str | None:
    """The name of the process that trains this run; None where none does."""
    found = [
        lease.holder
        for lease in step.ledger().held(resource(run.uri))
        if lease.resource == resource(run.uri)
    ]
    return found[0] if found else None


def start(run: Run, owner: str, replay: str | None = None) -> None:
    """Start the process, unless one is there; return once it has the right to launch, or has ended.

    `owner` is in whose name the run and its devices are held. Raises ServiceUnreachable where it did not come up in time.
    """
    if launcher(run) is not None:
        return
    run.note(state="running", error=None)
    logs = run.work_folder() / _LOGS
    logs.mkdir(exist_ok=True)
    inherited = {
        name: value for name, value in os.environ.items() if name != "TRAINWRIGHT_PROGRESS"
    }
    environment = training_service(settings().home).adopt(inherited)
    with (logs / "launcher.log").open("ab") as log:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "trainwright.tasks.train.launcher.background",
                run.uri,
                owner,
                *([replay] if replay else []),
            ],
            env=environment,
            cwd=run.work_folder(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    until = time.monotonic() + START_TIMEOUT_S
    while launcher(run) is None and process.poll() is None:
        if time.monotonic() > until:
            process.kill()
            raise ServiceUnreachable(
                f"training process: not up in {START_TIMEOUT_S:g} s; its log is {logs / 'launcher.log'}"
            )
        time.sleep(0.1)


def raise_failure(run: Run) -> None:
    """After the process has ended: raise what it ended with; nothing where training is done."""
    if run.has(Result):
        return
    error = run.status().error
    if error is not None:
        raise from_document(error)
    raise Interrupted(
        f"{run.uri}: the training process ended without a word; it goes on from the newest checkpoint when tried again"
    )


def stop(run: Run, owner: str) -> bool:
    """Stop the process, wherever it runs, and free what the run holds; whether there was one.

    It ends with a checkpoint where step and checkpoint take no longer than GRACE_S. On this machine it is gone when this returns,
    and keeps its right to launch until then: no other is started beside it, and whoever stops it too waits as long.
    Elsewhere it learns within LOOK_EVERY_S that it lost its lease; its devices are freed when it has ended, or must have, whoever
    of several told it to.
    """
    name = launcher(run)
    if name is None:
        _wait_for_another(run, owner)
    elif host_of(name) != socket.gethostname():
        step.ledger().release(run.uri, [resource(run.uri)])
        _wait_for_devices(run, owner)
    elif (process := on_this_machine(name)) is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGTERM)
        until = time.monotonic() + GRACE_S + 2.0
        while on_this_machine(name) is not None and time.monotonic() < until:
            time.sleep(0.05)
        if on_this_machine(name) is not None:
            os.kill(process, signal.SIGKILL)  # ranks end with it
    if name is not None:
        step.ledger().release(run.uri, [resource(run.uri)], holder=name)
    step.ledger().release(run.uri, holder=owner)
    if name is not None and run.status().state == "running":
        error = Interrupted("stopped on request; it goes on from the newest checkpoint")
        run.note(state="interrupted", step="train", error=error.document())
    return name is not None


def stop_unfollowed(run: Run, owner: str) -> bool:
    """Stop the process where it works on the run in this owner's name, whose task has ended; whether there was one.

    A deferred task is stopped by its trigger. Where no triggerer lives when the task is ended, Airflow drops the trigger, and
    nobody tells the process. Where a trigger is about it, this waits for the devices.
    """
    if not any(
        (lease.run, lease.holder) == (run.uri, owner) for lease in step.ledger().held(run.hold)
    ):
        return False
    if launcher(run) is not None:
        return stop(run, owner)
    _wait_for_another(run, owner)
    return False


def _wait_for_another(run: Run, owner: str) -> None:
    """Where nobody has the right to launch: it may have been taken, a moment ago, from a process elsewhere that still works."""
    status = run.status()
    if status.state == "running" and status.step in ("search_lr", "train") and not run.has(Result):
        _wait_for_devices(run, owner)


def _wait_for_devices(run: Run, owner: str) -> None:
    """Until a process elsewhere, which was told to end, has freed them, or must have ended."""
    until = time.monotonic() + LOOK_EVERY_S + GRACE_S + 2.0
    while time.monotonic() < until and any(
        (lease.run, lease.holder) == (run.uri, owner) for lease in step.ledger().held("device ")
    ):
        time.sleep(0.2)


class Logs:
    """What the launcher and the ranks of a run have written since it was last asked, line by line, across restarts of who asks.

    Live where the run's work folder is on this machine; otherwise the logs come into the run's folder when training ends.
    """

    def __init__(self, run: Run) -> None:
        self._folder = run.work_folder()
        self._place = self._folder / "relayed.json"

    def fresh(self) -> list[str]:
        """The lines since, each with the name of who wrote it."""
        try:
            places = json.loads(self._place.read_text())
        except (FileNotFoundError, ValueError):
            places = {}
        lines = []
        for path in sorted((self._folder / _LOGS).glob("*.log")):
            written, place = path.stat().st_size, int(places.get(path.name, 0))
            with path.open("rb") as file:
                file.seek(place if place <= written else 0)
                whole, _, _ = file.read().rpartition(b"\n")
                places[path.name] = (place if place <= written else 0) + (
                    len(whole) + 1 if whole else 0
                )
            lines += [
                f"{path.stem}: {line}"
                for line in whole.decode(errors="replace").splitlines()
                if line.strip()
            ]
        if lines:
            self._place.write_text(json.dumps(places))
        return lines


def main(run_uri: str, owner: str, replay: str | None = None) -> int:
    """Train; the exit code."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: step.stop.set())
    run, name = Run(run_uri), own_name()
    if not _launches(run, name):
        return 0
    me = step.act_as(Holder(owner), lambda: _launches(run, name))
    threading.Thread(target=_obey, args=(run, name, me.name), name="obey", daemon=True).start()
    code = 0
    try:
        steps.do(run, "train", replay)
    except TrainwrightError as error:
        code = error.exit_code
        _log.error("%s: %s", error.kind, error)
    except BaseException:
        code = 1
        _log.exception("training failed")
        raise
    finally:
        _end(run, name, me.name if code != 0 else None)
    return code


def _launches(run: Run, name: str) -> bool:
    """Whether the right to launch is this process's, or free and now its; not where another has it."""
    try:
        step.ledger().take([resource(run.uri)], Holder(name, os.getpid()), run.uri)
    except RunHeld as held:
        _log.info("%s", held)
        return False
    return True


def _end(run: Run, name: str, owner: str | None) -> None:
    """Give back the right to launch, and before it what an `owner` holds for the run: unless a successor holds it by now."""
    if owner is not None and _launches(run, name):
        step.ledger().release(run.uri, holder=owner)
    step.ledger().release(run.uri, [resource(run.uri)], holder=name)


def _obey(run: Run, name: str, owner: str) -> None:
    """Keep the right to launch; stop when told to, by a signal or by losing it; and then in time."""
    ledger = step.ledger()
    while not step.stop.wait(LOOK_EVERY_S):
        with contextlib.suppress(ServiceUnreachable):
            if not ledger.renew(run.uri, [resource(run.uri)], holder=name):
                _log.info("the right to launch this run was taken away: stopping")
                step.stop.set()
    time.sleep(GRACE_S)
    _log.warning("not stopped in %g s: ending the process; the newest checkpoint stays", GRACE_S)
    with contextlib.suppress(ServiceUnreachable):
        _end(run, name, owner)
    os._exit(130)  # ranks end with their parent


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        raise SystemExit(str(BadInput("arguments: RUN HOLDER [REPLAY]")))
    sys.exit(main(*sys.argv[1:]))
