"""What surrounds a step of a run: its hold on the run, its line in the status, how it is stopped, how its failure is told."""

from __future__ import annotations

import contextlib
import errno
import functools
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, ParamSpec

from trainwright.tasks import progress
from trainwright.tasks.errors import (
    BadInput,
    Interrupted,
    MustWait,
    RunHeld,
    TrainwrightError,
    final_state,
)
from trainwright.tasks.leases.ledger import Heartbeat, Holder, Ledger
from trainwright.tasks.runs.run import Run
from trainwright.tasks.settings import settings

Reference = dict[str, Any]
P = ParamSpec("P")
Step = Callable[Concatenate[Run, P], Reference]

stop = threading.Event()
"""Set by whoever wants the running step to end (a signal handler, Airflow's on_kill)."""
_LOOK = ("allocate", "search_lr", "train")
"""Steps that end in their own way when it is set."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_running: str | None = None


def ask_to_stop(*_: Any) -> None:
    """Handle a signal: a step that looks at `stop` ends in its own way, others at once. Raises KeyboardInterrupt."""
    stop.set()
    if _running not in _LOOK:
        raise KeyboardInterrupt


def ledger() -> Ledger:
    """The ledger that the settings name."""
    return Ledger(settings().ledger_url)


_me: Holder | None = None
_right: Callable[[], bool] | None = None


def act_as(owner: Holder, right: Callable[[], bool] | None = None) -> Holder:
    """From now on this process holds things in this name, or in the one that whoever started it says; which.

    `right` tells whether this process may still speak for the name, where others may come to hold things in it too.
    """
    global _me, _right
    config, _right = settings(), right
    _me = Holder(config.holder, config.holder_pid) if config.holder else owner
    return _me


def holder(run: Run) -> Holder:
    """In whose name this process holds things: as `act_as` said, else in the name of who opened the run."""
    config = settings()
    return _me or Holder(config.holder or run.status().holder, config.holder_pid)


def step(name: str, *, last: bool = False) -> Callable[[Step[P]], Step[P]]:
    """Note in the run's status that a step runs, how long it took, how it ended; keep the run's hold alive meanwhile."""

    def decorate(work: Step[P]) -> Step[P]:
        @functools.wraps(work)
        def wrapped(run: Run, /, *args: P.args, **kwargs: P.kwargs) -> Reference:
            global _running
            started = time.monotonic()
            progress.emit("step", name=name, state="started", run=run.uri)
            if not run.exists():
                raise BadInput(f"run: got {run.uri}; there is no such run")
            me = holder(run)
            if not ledger().renew(run.uri, [run.hold], holder=me.name):
                ledger().take([run.hold], me, run.uri)
            run.note(state="running", step=name, error=None, holder=me.name)
            try:
                _running = name
                if stop.is_set():
                    raise Interrupted(f"{name}: stopped before it began")
                with (
                    _disk_told(name, run),
                    Heartbeat(ledger(), run.uri, [run.hold], holder=me.name) as beat,
                ):
                    reference = work(run, *args, **kwargs)
                if not (beat.still_held() and _may_speak()):
                    raise RunHeld(f"{run.uri}: the hold on this run was lost while {name} ran")
                seconds = time.monotonic() - started
                steps = _with(run, name, seconds, least=reference.get("duration_s", 0.0))
                run.note(step=None, steps=steps, **({"state": "success"} if last else {}))
                if last:
                    ledger().release(run.uri, holder=me.name)
                progress.emit("step", name=name, state="done", seconds=seconds, summary=reference)
            except (
                MustWait
            ) as wait:  # whoever called keeps the run's hold and its place, and calls again
                progress.emit("queue", message=str(wait), run=run.uri)
                run.note(steps=_with(run, name, time.monotonic() - started))
                raise
            except BaseException as error:
                _note_failure(run, name, error, time.monotonic() - started)
                raise
            finally:
                _running = None
            return {"run": run.uri, **reference}

        return wrapped

    return decorate


@contextlib.contextmanager
def _disk_told(name: str, run: Run) -> Iterator[None]:
    """A disk of this machine that takes no more is one line that says which."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        where = (
            error.filename or f"{run.work_path} or {tempfile.gettempdir()}"
        )  # a file that was open tells no name
        raise TrainwrightError(
            f"{name}: {where} can't be written ({error.strerror}); free space there and start again: it goes on where it was"
        ) from error


def _may_speak() -> bool:
    return _right is None or _right()


def _with(run: Run, name: str, seconds: float, least: float = 0.0) -> dict[str, float]:
    """The seconds of the run's steps, these added: a step done again took both times.

    `least`: what the work itself took, killed processes' part in it included, who could note nothing.
    """
    before = run.status().steps
    return before | {name: round(max(before.get(name, 0.0) + seconds, least), 3)}


def _note_failure(run: Run, name: str, error: BaseException, seconds: float) -> None:
    """Write down how a step ended and what it took, give up the hold, and tell whoever watches."""
    ours = (
        error
        if isinstance(error, TrainwrightError)
        else TrainwrightError(f"{name}: {type(error).__name__}: {error}")
    )
    if isinstance(error, KeyboardInterrupt):
        ours = Interrupted(f"{name}: interrupted")
    progress.emit("step", name=name, state="failed", error=ours.document())
    me = holder(run)
    try:
        if not (_may_speak() and ledger().renew(run.uri, [run.hold], holder=me.name)):
            return  # another has the run by now: its status is not ours to write
        try:
            run.note(
                state=final_state(ours),
                step=name,
                error=ours.document(),
                steps=_with(run, name, seconds),
            )
        finally:
            ledger().release(run.uri, [run.hold], holder=me.name)
    except (OSError, TrainwrightError) as why:  # the step's own error is what the caller hears
        progress.emit("notice", message=f"how {name} ended could not be noted: {why}")
