"""The steps of a run as values, in order, and how to run one of them.

    validate → recommend → extract → estimate → allocate → search_lr → train → (release) → store
    → analyze → export

A `StepSpec` holds everything that the chain, the operators, the command line, the page and the
tests need to know about a step. A package adds a step of its own by one entry point in the group
`trainwright.steps` that names its StepSpec:

    [project.entry-points."trainwright.steps"]
    fairness = "my_package.fairness:STEP"

Each step reads its input from the run's folder, does its work and adds its artefact. A step whose
artefact exists and is still valid does not run again.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from signal import SIGINT, SIGTERM
from typing import Literal

from pydantic import BaseModel

from trainwright.estimator.near_names import meant
from trainwright.estimator.structure import Structure
from trainwright.tasks import progress
from trainwright.tasks.context import Reference, RunContext
from trainwright.tasks.errors import (
    BadInput,
    Interrupted,
    MustWait,
    RunHeld,
    TrainwrightError,
    final_state,
)
from trainwright.tasks.leases.ledger import Heartbeat
from trainwright.tasks.runs.artefacts.estimate import Estimate
from trainwright.tasks.runs.artefacts.export_report import Exports
from trainwright.tasks.runs.artefacts.learning_rate_search import LearningRateSearch
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.runs.artefacts.recommendation import Recommendation
from trainwright.tasks.runs.artefacts.report_figures import Report
from trainwright.tasks.runs.artefacts.run_status import Manifest
from trainwright.tasks.runs.artefacts.training_result import Result
from trainwright.tasks.runs.artefacts.validation import Validation
from trainwright.tasks.runs.run import Run

ENTRY_POINTS = "trainwright.steps"
PROGRESS = "progress.jsonl"
"""A file in a run's work folder.

If it exists, every process of the run appends its events to it.
"""
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class StepSpec:
    """A step. Its module and its operator are imported only when needed."""

    name: str
    artefact: type[BaseModel]
    """the file in the run's folder that marks the step as done"""
    module: str
    """defines `work(context) -> Reference` and `summary(reference) -> str`, a line for users"""
    operator: str
    """the step's Airflow operator, `module:class`, a subclass of StepOperator"""
    after: str | None = None
    """for a registered step: the step after which it runs"""
    on_stop: Literal["raise", "end itself"] = "raise"
    """`end itself`: the step watches the context's stop event, saves its state, and returns"""
    once_per_dag_run: bool = False
    """whether an operator with a `job` starts a new run if an earlier DAG run did this step"""
    repeatable: bool = False
    """whether it may run again on a finished run without changing the run's status"""

    def do(self, context: RunContext) -> Reference:
        """Do the step's work only; `run_step` adds status, lease and error handling."""
        reference: Reference = importlib.import_module(self.module).work(context)
        return reference

    def summary(self, reference: Reference) -> str:
        """The step's result in one line for users."""
        line: str = importlib.import_module(self.module).summary(reference)
        return line


_TASKS, _OPERATORS = "trainwright.tasks", "trainwright.operators"
_BUILT_IN = (
    StepSpec(
        "validate", Validation, f"{_TASKS}.validate.step", f"{_OPERATORS}.validate:ValidateOperator"
    ),
    StepSpec(
        "recommend",
        Recommendation,
        f"{_TASKS}.recommend.step",
        f"{_OPERATORS}.recommend:RecommendOperator",
    ),
    StepSpec("extract", Structure, f"{_TASKS}.extract", f"{_OPERATORS}.extract:ExtractOperator"),
    StepSpec(
        "estimate", Estimate, f"{_TASKS}.estimate.step", f"{_OPERATORS}.estimate:EstimateOperator"
    ),
    StepSpec(
        "allocate",
        Plan,
        f"{_TASKS}.allocate.step",
        f"{_OPERATORS}.allocate:AllocateOperator",
        on_stop="end itself",
    ),
    StepSpec(
        "search_lr",
        LearningRateSearch,
        f"{_TASKS}.search_lr.step",
        f"{_OPERATORS}.search_lr:SearchLearningRateOperator",
        on_stop="end itself",
    ),
    StepSpec(
        "train",
        Result,
        f"{_TASKS}.train.step",
        f"{_OPERATORS}.train:TrainOperator",
        on_stop="end itself",
        once_per_dag_run=True,
    ),
    StepSpec(
        "store",
        Manifest,
        f"{_TASKS}.store",
        f"{_OPERATORS}.store:StoreOperator",
        once_per_dag_run=True,
    ),
    StepSpec(
        "analyze",
        Report,
        f"{_TASKS}.analyze.step",
        f"{_OPERATORS}.analyze:AnalyzeOperator",
        once_per_dag_run=True,
        repeatable=True,
    ),
    StepSpec(
        "export",
        Exports,
        f"{_TASKS}.export.step",
        f"{_OPERATORS}.export:ExportOperator",
        once_per_dag_run=True,
        repeatable=True,
    ),
)


@cache
def steps() -> tuple[StepSpec, ...]:
    """All steps in order, including registered ones.

    Raises BadInput if a registered step can't be loaded, has the name of another step, or follows
    an unknown step.
    """
    found = list(_BUILT_IN)
    waiting = [_registered(one) for one in entry_points(group=ENTRY_POINTS)]
    while waiting:
        names = [one.name for one in found]
        ready = next((one for one in waiting if one.after in names), None)
        if ready is None:
            raise BadInput(
                f"step {waiting[0].name}: after: got {waiting[0].after!r}; "
                f"allowed: {', '.join(names)}"
            )
        if ready.name in names:
            raise BadInput(f"step {ready.name}: registered twice; give each step its own name")
        found.insert(names.index(str(ready.after)) + 1, ready)
        waiting.remove(ready)
    return tuple(found)


def _registered(point: EntryPoint) -> StepSpec:
    package = point.dist.name if point.dist else point.value
    try:
        spec = point.load()
    except Exception as error:
        raise BadInput(
            f"step {point.name} of {package}: can't be loaded: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(spec, StepSpec):
        raise BadInput(
            f"step {point.name} of {package}: got {point.value}, a {type(spec).__name__}; "
            "allowed: a StepSpec"
        )
    return spec


def step(name: str) -> StepSpec:
    """The step with this name. Raises BadInput if there is none."""
    for one in steps():
        if one.name == name:
            return one
    names = [one.name for one in steps()]
    raise BadInput(f"step: got {name!r}; allowed: {', '.join(names)}{meant(name, names)}")


@contextlib.contextmanager
def signals_stop(context: RunContext) -> Iterator[None]:
    """Inside the block, SIGINT and SIGTERM stop the running step.

    A step that watches the stop event ends itself; KeyboardInterrupt interrupts any other step.
    """

    def handle(*_: object) -> None:
        context.stop.set()
        if context.running is None or step(context.running).on_stop == "raise":
            raise KeyboardInterrupt

    before = {number: signal.signal(number, handle) for number in (SIGINT, SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def do(context: RunContext, name: str) -> Reference:
    """Run a step, after all earlier steps that are not done yet.

    A sealed run is done up to its seal: it may lack the artefact of a step that came later.
    """
    wanted, sealed = step(name), context.run.finished()
    for one in steps():
        if one is wanted:
            break
        if not sealed and not context.run.has(one.artefact):
            run_step(context, one)
        sealed = sealed and one.artefact is not Manifest
    return run_step(context, wanted)


def following(run: Run) -> AbstractContextManager[None]:
    """Inside the block, append events to the run's progress file for its followers."""
    return progress.listening(progress.appended_to(run.work_path / PROGRESS))


def keep_hold(context: RunContext) -> None:
    """Renew the lease on the run, or take it again. Raises RunHeld if another process has it."""
    run, ledger, me = context.run, context.ledger, context.holder
    if not ledger.renew(run.uri, [run.hold], holder=me.name):
        ledger.take([run.hold], me, run.uri)


def run_step(context: RunContext, spec: StepSpec) -> Reference:
    """Run one step: hold the run, record its status, handle stop and failure.

    Returns the step's reference. Raises the step's errors; RunHeld if another process holds the run
    or takes it over; MustWait if the run waits in the queue for devices (the caller keeps the lease
    and calls again).
    """
    run, ledger, me = context.run, context.ledger, context.holder
    if not run.exists():
        raise BadInput(f"run: got {run.uri}; there is no such run")
    if spec.repeatable and run.finished() and run.status().state == "success":
        return {"run": run.uri, **spec.do(context)}
    with following(run):
        started = time.monotonic()
        progress.emit("step", name=spec.name, state="started", run=run.uri)
        keep_hold(context)
        run.note(state="running", step=spec.name, error=None, holder=me.name)
        try:
            context.running = spec.name
            if context.stop.is_set():
                raise Interrupted(f"{spec.name}: stopped before it started")
            with (
                _disk_full_reported(spec.name, run.work_path),
                Heartbeat(ledger, run.uri, [run.hold], holder=me.name) as heartbeat,
            ):
                reference = spec.do(context)
            if not (heartbeat.still_held() and context.may_act()):
                raise RunHeld(f"{run.uri}: another process took over this run during {spec.name}")
            seconds = time.monotonic() - started
            took = _steps_with(context, spec, seconds, least_s=reference.get("duration_s", 0.0))
            if spec is steps()[-1]:
                run.note(step=None, steps=took, state="success")
                ledger.release(run.uri, holder=me.name)
            else:
                run.note(step=None, steps=took)
            progress.emit(
                "step",
                name=spec.name,
                state="done",
                seconds=seconds,
                summary=reference,
                line=spec.summary(reference),
            )
        except MustWait as wait:
            progress.emit("queue", message=str(wait), **wait.details)
            run.note(steps=_steps_with(context, spec, time.monotonic() - started))
            raise
        except BaseException as error:
            # A stop also ends the processes that the step started, whose end is no failure.
            if stopped := context.stop.is_set() and type(error) is TrainwrightError:
                error = Interrupted(f"{spec.name}: stopped")
            _record_failure(context, spec, error, time.monotonic() - started)
            if stopped:
                raise error from None
            raise
        finally:
            context.running = None
        return {"run": run.uri, **reference}


@contextlib.contextmanager
def _disk_full_reported(name: str, work_path: Path) -> Iterator[None]:
    """Turn the error of a full disk on this machine into one line that names the disk."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        # The error of a write to an open file has no file name.
        where = error.filename or f"{work_path} or {tempfile.gettempdir()}"
        raise TrainwrightError(
            f"{name}: can't write {where} ({error.strerror}); free some space and start again: "
            "the run continues where it stopped"
        ) from error


def _steps_with(
    context: RunContext, spec: StepSpec, seconds: float, least_s: float = 0.0
) -> dict[str, float]:
    """The seconds of each step, with this step's added: repeated steps add up.

    `least_s`: the duration that the work reports, which includes that of killed processes.
    """
    before = context.run.status().steps
    total_s = max(before.get(spec.name, 0.0) + seconds, least_s)
    return before | {spec.name: round(total_s, 3)}


def _record_failure(
    context: RunContext, spec: StepSpec, error: BaseException, seconds: float
) -> None:
    """Record how a step ended, release the lease, and report the end to followers."""
    run, ledger, me = context.run, context.ledger, context.holder
    ours = (
        error
        if isinstance(error, TrainwrightError)
        else Interrupted(f"{spec.name}: interrupted")
        if isinstance(error, KeyboardInterrupt)
        else TrainwrightError(f"{spec.name}: {type(error).__name__}: {error}")
    )
    progress.emit("step", name=spec.name, state="failed", error=ours.document())
    try:
        if not (context.may_act() and ledger.renew(run.uri, [run.hold], holder=me.name)):
            return  # another process has taken over the run, and its status
        try:
            took = _steps_with(context, spec, seconds)
            run.note(state=final_state(ours), step=spec.name, error=ours.document(), steps=took)
        finally:
            ledger.release(run.uri, [run.hold], holder=me.name)
    except (OSError, TrainwrightError) as why:  # the caller still gets the step's own error
        progress.emit("notice", message=f"can't record how {spec.name} ended: {why}")
