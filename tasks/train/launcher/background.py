"""The training process: starts it, stops it, and relays its logs. It outlives its starter.

`python -m trainwright.tasks.train.launcher.background RUN HOLDER [--pid PID] [--replay RUN]` takes
the right to launch this run and trains from the newest checkpoint. The right is a lease that ends
with the process, so two never train one run; a process that loses the lease stops. The outcome is
in the run's folder: result.json, or the error in status.json.

If the holder is a process of this machine (`trainwright run`, PID), the training ends with it. The
command line passes PID, because that process, and its lease with it, may end during the start.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

from trainwright.infra.airflow import training_service
from trainwright.infra.private_files import keep_private
from trainwright.tasks import chain, progress
from trainwright.tasks.context import RunContext
from trainwright.tasks.errors import (
    Interrupted,
    RunHeld,
    ServiceUnreachable,
    TrainwrightError,
    from_document,
)
from trainwright.tasks.event_lines import MovingLines
from trainwright.tasks.leases.launch_right import host_of, on_this_machine, own_name, resource
from trainwright.tasks.leases.ledger import Holder, Ledger
from trainwright.tasks.leases.tables import process_started
from trainwright.tasks.runs.artefacts.training_result import Result
from trainwright.tasks.runs.run import Run
from trainwright.tasks.settings import Settings

START_TIMEOUT_S = 120.0
LOOK_EVERY_S = 1.0
GRACE_S = 7.0
"""The time for the ranks' last step and checkpoint after a stop: a task's ranks end within 10 s."""
_LOGS = "logs"
_LAUNCHER = "launcher"
_TIME_OF_LINE = re.compile(r"[\d-]{10} [\d:,]{12} (INFO )?")
_log = logging.getLogger("trainwright")


def launcher(run: Run) -> str | None:
    """The name of the process that trains this run; None if no process does."""
    name = resource(run.uri)
    held = Ledger(run.settings.ledger_url).held(name)
    return next((lease.holder for lease in held if lease.resource == name), None)


def start(context: RunContext) -> None:
    """Start the process unless it runs; return when it has the right to launch, or has ended.

    Raises ServiceUnreachable if it does not start in time.
    """
    run = context.run
    if launcher(run) is not None:
        return
    run.note(state="running", error=None)
    logs = run.work_folder() / _LOGS
    logs.mkdir(exist_ok=True)
    arguments = [run.uri, context.holder.name]
    if context.holder.pid is not None:
        arguments += ["--pid", str(context.holder.pid)]
    if context.replay is not None:
        arguments += ["--replay", context.replay.uri]
    environment = training_service(run.settings.home).adopt(run.settings.environment())
    with (logs / "launcher.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "trainwright.tasks.train.launcher.background", *arguments],
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
                f"training process: did not start within {START_TIMEOUT_S:g} s; "
                f"its log is {logs / 'launcher.log'}"
            )
        time.sleep(0.05)


def raise_failure(run: Run) -> None:
    """After the process has ended: raise its error; returns if training is done.

    Followers get the error of a process that could not report it.
    """
    if run.has(Result):
        return
    error = run.status().error
    if error is not None:
        raise from_document(error)
    killed = Interrupted(
        f"{run.uri}: the training process was killed (it reported no error; its log is "
        f"{run.work_path / _LOGS / 'launcher.log'}); started again, the run continues from its "
        "newest checkpoint"
    )
    with chain.following(run):
        progress.emit("step", name="train", state="failed", error=killed.document())
    raise killed


def stop(context: RunContext) -> bool:
    """Stop the process on any machine, and release what the run holds.

    Returns whether there was one.

    It saves a checkpoint if the current step and the checkpoint take at most GRACE_S. A process on
    this machine has ended when this returns. It keeps its right until then, so that no second one
    starts, and concurrent callers wait too. A process on another machine notices the lost lease
    within LOOK_EVERY_S; this returns when its devices are free or it must have ended.
    """
    run, ledger = context.run, context.ledger
    name = launcher(run)
    if name is None:
        _wait_for_another_stop(context)
    elif host_of(name) != socket.gethostname():
        ledger.release(run.uri, [resource(run.uri)])
        _wait_for_devices(context)
    elif (process := on_this_machine(name)) is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGTERM)
        until = time.monotonic() + GRACE_S + 2.0
        while on_this_machine(name) is not None and time.monotonic() < until:
            time.sleep(0.05)
        if on_this_machine(name) is not None:
            os.kill(process, signal.SIGKILL)  # the kernel ends its ranks too
    if name is not None:
        ledger.release(run.uri, [resource(run.uri)], holder=name)
    ledger.release(run.uri, holder=context.holder.name)
    if name is not None and run.status().state == "running":
        error = Interrupted("stopped on request; it continues from the newest checkpoint")
        run.note(state="interrupted", step="train", error=error.document())
    return name is not None


def stop_unfollowed(context: RunContext) -> bool:
    """Stop the process if this holder, whose task has ended, has one. Returns whether it had.

    Normally the trigger of a deferred task stops the process. If no triggerer runs when the task
    ends, Airflow drops the trigger, so nothing stops the process. If a trigger is already stopping
    it, this waits for the devices.
    """
    run, me = context.run, context.holder.name
    holds = context.ledger.held(run.hold)
    if not any((lease.run, lease.holder) == (run.uri, me) for lease in holds):
        return False
    if launcher(run) is not None:
        return stop(context)
    _wait_for_another_stop(context)
    return False


def _wait_for_another_stop(context: RunContext) -> None:
    """Wait if another stop may have taken the right from a process that still works."""
    status = context.run.status()
    working = status.state == "running" and status.step in ("search_lr", "train")
    if working and not context.run.has(Result):
        _wait_for_devices(context)


def _wait_for_devices(context: RunContext) -> None:
    """Wait until a stopped process elsewhere has freed its devices, or must have ended."""
    run, me = context.run, context.holder.name
    until = time.monotonic() + LOOK_EVERY_S + GRACE_S + 2.0
    while time.monotonic() < until and any(
        (lease.run, lease.holder) == (run.uri, me) for lease in context.ledger.held("device ")
    ):
        time.sleep(0.2)


class Logs:
    """New lines of the launcher's and the ranks' logs. Restarts of the reader lose none.

    Live if the run's work folder is on this machine. Otherwise the logs reach the run's folder when
    the training ends.
    """

    def __init__(self, run: Run) -> None:
        self._folder = run.work_folder()
        self._positions = self._folder / "relayed.json"

    def fresh(self) -> list[str]:
        """The lines since the last call: a rank's with its name, the launcher's without time."""
        try:
            positions = json.loads(self._positions.read_text())
        except (FileNotFoundError, ValueError):
            positions = {}
        lines = []
        for path in sorted((self._folder / _LOGS).glob("*.log")):
            written, position = path.stat().st_size, int(positions.get(path.name, 0))
            begin = position if position <= written else 0
            with path.open("rb") as file:
                file.seek(begin)
                whole, _, _ = file.read().rpartition(b"\n")
            positions[path.name] = begin + (len(whole) + 1 if whole else 0)
            shown = whole.decode(errors="replace").splitlines()
            lines += [_line_of(path.stem, line) for line in shown if line.strip()]
        if lines:
            self._positions.write_text(json.dumps(positions))
        return lines


def _line_of(log: str, line: str) -> str:
    """A line of a log as another log shows it, which has times of its own."""
    return _TIME_OF_LINE.sub("", line) if log == _LAUNCHER else f"{log}: {line}"


class _Launch:
    """The training process itself."""

    def __init__(self, run: Run, holder: Holder, replay: Run | None) -> None:
        self._run, self._name = run, own_name()
        self._right = [resource(run.uri)]
        self._context = RunContext(run, holder, replay=replay, may_act=self._take_right)

    def train(self) -> int:
        """Train unless another process does. Returns the exit code."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self._context.stop.set())
        if self._holder_ended() or not self._take_right():
            return 0
        threading.Thread(target=self._watch, name="watch", daemon=True).start()
        code = 1
        try:
            chain.do(self._context, "train")
            code = 0
        except TrainwrightError as error:
            code = error.exit_code
            _log.error("%s: %s", error.kind, error)
        except BaseException:
            _log.exception("training failed")
            raise
        finally:
            self._end(failed=code != 0)
        return code

    def _holder_ended(self) -> bool:
        """Whether the holder is a process of this machine that has ended."""
        holder = self._context.holder
        if holder.pid is None or process_started(holder.pid) is not None:
            return False
        _log.info("%s has ended: stopping", holder.name)
        return True

    def _take_right(self) -> bool:
        """Take or renew the right to launch. Returns whether this process holds it."""
        try:
            self._context.ledger.take(self._right, Holder(self._name, os.getpid()), self._run.uri)
        except RunHeld as held:
            _log.info("%s", held)
            return False
        return True

    def _end(self, *, failed: bool) -> None:
        """Release the right to launch. If the training failed, first release what the run holds.

        A successor that has the right also has what the run holds, so nothing is released then.
        """
        ledger = self._context.ledger
        try:
            if failed and self._take_right():
                ledger.release(self._run.uri, holder=self._context.holder.name)
            ledger.release(self._run.uri, self._right, holder=self._name)
        except ServiceUnreachable as error:  # the leases end with this process
            _log.error("%s", error)

    def _watch(self) -> None:
        """Renew the right to launch. Stop if the right is lost or the holder has ended.

        Ends the process if it does not stop within GRACE_S.
        """
        stop = self._context.stop
        while not stop.wait(LOOK_EVERY_S):
            with contextlib.suppress(ServiceUnreachable):
                if not self._context.ledger.renew(self._run.uri, self._right, holder=self._name):
                    _log.info("another process took the right to launch this run: stopping")
                    stop.set()
            if self._holder_ended():
                stop.set()
        time.sleep(GRACE_S)
        _log.warning("not stopped within %g s: exiting; the newest checkpoint stays", GRACE_S)
        self._end(failed=True)
        os._exit(130)  # the kernel ends the ranks with their parent


def main() -> int:
    """Train as the arguments say. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="background", description="Train a run.")
    parser.add_argument("run", metavar="RUN", help="the run's URI")
    parser.add_argument("holder", metavar="HOLDER", help="the holder of the run and its devices")
    parser.add_argument("--pid", type=int, help="the holder's process; training ends with it")
    parser.add_argument("--replay", metavar="RUN", help="the run whose splits are used again")
    given = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    keep_private()
    progress.listen(MovingLines(progress.log_line))
    settings = Settings.from_environment()
    replayed = Run(given.replay, settings) if given.replay is not None else None
    return _Launch(Run(given.run, settings), Holder(given.holder, given.pid), replayed).train()


if __name__ == "__main__":
    sys.exit(main())
