"""Entry points for tests: settings from the environment, and runs opened with them."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from trainwright.tasks import chain
from trainwright.tasks.context import Reference, RunContext
from trainwright.tasks.leases.ledger import Holder, Ledger
from trainwright.tasks.runs.artefacts.training_result import Result
from trainwright.tasks.runs.run import Run
from trainwright.tasks.settings import Settings
from trainwright.tasks.spec.job import Job


def settings() -> Settings:
    """The settings in the current environment."""
    return Settings.from_environment()


def ledger() -> Ledger:
    """The ledger of the settings."""
    return Ledger(settings().ledger_url)


def run_at(uri: str) -> Run:
    """The run at a URI."""
    return Run(uri, settings())


def open_for(job: Job, holder: Holder, **terms: Any) -> Run:
    """Open a run of a job for a holder."""
    return RunContext.open(job, settings(), holder, **terms).run


def attach(run: Run, **terms: Any) -> RunContext:
    """Attach to a run for the holder in its status."""
    return RunContext.attach(run, **terms)


def do(run: Run, name: str, replay: str | None = None, **terms: Any) -> Reference:
    """Run a step, after the missing earlier ones."""
    replayed = run_at(replay) if replay is not None else None
    return chain.do(attach(run, replay=replayed, **terms), name)


def validated(job: Job) -> Run:
    """A new run of a job that did the step `validate`, and is released."""
    run = open_for(job, Holder("me"), new=True)
    try:
        do(run, "validate")
    finally:
        ledger().release(run.uri)
    return run


def run_work(context: RunContext, work: Callable[[RunContext], Any]) -> Reference:
    """Run a step whose work is this function."""
    module = types.ModuleType("step_of_a_test")
    module.work = work  # type: ignore[attr-defined]
    module.summary = lambda _: "done"  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, module)
        spec = chain.StepSpec("train", Result, module.__name__, operator="")
        return chain.run_step(context, spec)
