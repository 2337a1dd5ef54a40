"""What a step works with: the run, its holder, and the signal to stop.

An entry point (the command line, an operator, the service, a test) makes a `RunContext` and passes
it on. Steps find none of this by themselves: there are no module globals, and only entry points
read the environment.
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
"""What a step returns: the run, the artefact's file, a summary. Small, and valid JSON."""


@dataclass
class RunContext:
    """A run, and how this process works on it."""

    run: Run
    holder: Holder
    """the holder of the run and its devices in the ledger"""
    stop: threading.Event = field(default_factory=threading.Event)
    """set to stop the running step, for example by a signal handler or Airflow's on_kill"""
    replay: Run | None = None
    """the run whose plan, learning rate and split events are repeated"""
    defers: bool = False
    """whether a step raises MustWait instead of waiting for devices"""
    running: str | None = None
    """the current step"""
    reported_place: int = 0
    """the last reported place in the queue for devices; 0: none yet"""
    may_act: Callable[[], bool] = lambda: True
    """whether this process may still act for the holder; another may have replaced it"""

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
        """Open a run of a job (see `open_run`) for `holder`, after checking the job's pool."""
        pool = load_pool(job.pool)
        require_possible(job, pool)
        usable(pool, job)  # raises BadInput if there are too few
        run = open_run(
            job, settings, holder, store or settings.store, new=new, worker=worker, lacking=lacking
        )
        return cls(run, holder, **terms)

    @classmethod
    def attach(cls, run: Run, holder: str | None = None, **terms: Any) -> RunContext:
        """Attach to an existing run for a holder; by default the one in its status.

        If that holder's lease on the run ends with a local process, so do the leases taken here.
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
