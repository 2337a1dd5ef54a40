"""What a step works with: the run, who holds it, and how the work is stopped.

A door (the command line, an operator, the service, a test) makes a `RunContext` and passes it on. No
step finds any of this by itself: there are no module globals, and only doors read the environment.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pydantic import BaseModel

from trainwright.tasks.leases.ledger import Holder, Ledger
from trainwright.tasks.runs.run import Run, open_run
from trainwright.tasks.settings import Settings
from trainwright.tasks.spec.eligibility import require_possible, usable
from trainwright.tasks.spec.job import Job
from trainwright.tasks.spec.pool import load_pool

Reference = dict[str, Any]
"""What a step returns: the run, the artefact's file, a summary. Small, and JSON."""


@dataclass
class RunContext:
    """A run, and the terms on which this process works on it."""

    run: Run
    holder: Holder
    """who holds the run and its devices in the ledger"""
    stop: threading.Event = field(default_factory=threading.Event)
    """set by whoever wants the running step to end: a signal handler, Airflow's on_kill"""
    replay: Run | None = None
    """the run whose plan, learning rate and split events are used again"""
    defers: bool = False
    """whether a step that must wait for devices raises MustWait instead of waiting"""
    running: str | None = None
    """the step that runs currently"""
    reported_place: int = 0
    """the place in the queue for devices that was last reported; 0: none yet"""
    may_act: Callable[[], bool] = lambda: True
    """whether this process may still act for the holder; another process may have taken its place"""

    @classmethod
    def open(
        cls,
        job: Job,
        settings: Settings,
        holder: Holder,
        *,
        store: str | None = None,
        new: bool = False,
        worker: str | None = None,
        lacking: type[BaseModel] | None = None,
        **terms: Any,
    ) -> RunContext:
        """The run that works on a job (see `open_run`), held by `holder`; the job's pool is checked first."""
        pool = load_pool(job.pool)
        require_possible(job, pool, usable(pool, job.devices))
        run = open_run(
            job, settings, holder, store or settings.store, new=new, worker=worker, lacking=lacking
        )
        return cls(run, holder, **terms)

    @classmethod
    def attach(cls, run: Run, holder: str | None = None, **terms: Any) -> RunContext:
        """An existing run, on behalf of a holder; by default the one that its status names.

        If that holder's hold on the run ends with a process of this machine, so does what it takes now.
        """
        name = holder or run.status().holder
        current = Ledger(run.settings.ledger_url).holder_of(run.hold)
        same = current is not None and current.name == name
        return cls(run, current if current is not None and same else Holder(name), **terms)

    @property
    def settings(self) -> Settings:
        """The run's settings."""
        return self.run.settings

    @cached_property
    def ledger(self) -> Ledger:
        """The ledger of leases."""
        return Ledger(self.settings.ledger_url)
