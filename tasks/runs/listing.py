"""Lists the runs of a store as rows, newest first, in pages.

Rows are cached. The row of a sealed, successful run is final and read once. For other runs,
status.json is read again after a while, and the other files only if it changed. So a store of a
thousand runs is listed quickly.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from trainwright.estimator.curves import Interval
from trainwright.tasks.errors import BadInput, CorruptArtefact
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.runs.artefacts.run_job import RunJob
from trainwright.tasks.runs.artefacts.run_status import RunState, Status
from trainwright.tasks.runs.artefacts.training_result import Result
from trainwright.tasks.runs.run import Run
from trainwright.tasks.runs.run_state import shown_state
from trainwright.tasks.settings import Settings
from trainwright.tasks.spec.metric_names import leading_metric
from trainwright.tasks.storage.connect import open_store
from trainwright.tasks.storage.objects import ObjectStore

JOB_PATTERN = r"^[a-z0-9-]{1,63}$"
ID_PATTERN = r"^[0-9]{8}T[0-9]{6}Z-[0-9a-f]{6}$"
MOST_ROWS = 1000
RUN_NAME = re.compile(rf"{JOB_PATTERN[:-1]}/{ID_PATTERN[1:]}")
FRESH_S = 2.0
ENDED_FRESH_S = 10.0  # for a run that has ended, but may be continued
_READERS = 8
_KEPT_ROWS = 20_000

RunName = tuple[str, str]
"""Run id and job; runs are sorted by it."""


class RunRow(BaseModel):
    """A run in a list. Values that are not known yet are None."""

    run: str
    id: str
    job: str
    state: RunState | str
    stored: bool | None = None
    """whether the model of a finished training is stored"""
    step: str | None = None
    holder: str | None = None
    started_at: str | None = None
    updated_at: str | None = None
    seconds: float = 0.0
    metrics: dict[str, float] = {}
    leading_metric: str | None = None
    """the metric that stands for the model: the job's target, if it names one"""
    predicted_duration_s: Interval | None = None
    duration_s: float | None = None
    predicted_energy_j: Interval | None = None
    energy_j: float | None = None
    cost: float | None = None
    devices: int | None = None
    global_batch_size: int | None = None
    learning_rate: float | None = None
    steps: int | None = None


class RunPage(BaseModel):
    """A page of rows. `next` is the `after` of the next page; None on the last page."""

    runs: list[RunRow]
    total: int
    next: str | None


@dataclass(frozen=True)
class _Kept:
    """A cached row, the status.json it was made of, and the time until which it is valid."""

    row: RunRow | None
    status: bytes
    until: float


class Listing:
    """The runs of a store. Thread-safe."""

    def __init__(self, store_uri: str, settings: Settings) -> None:
        self._settings = settings
        self._store: ObjectStore = open_store(store_uri, settings)
        self._lock = threading.Lock()
        self._names: tuple[float, list[RunName]] = (-FRESH_S, [])
        self._rows = dict[RunName, _Kept]()
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="listing")

    def close(self) -> None:
        """End its threads."""
        self._readers.shutdown(wait=False, cancel_futures=True)

    @property
    def uri(self) -> str:
        """The store's URI."""
        return self._store.uri

    def page(self, limit: int, after: str | None = None, job: str | None = None) -> RunPage:
        """Up to `limit` rows after the run `job/id`, without runs that are still being created.

        Raises BadInput if `after` has another form.
        """
        names = [name for name in self._all() if job is None or name[1] == job]
        rest = names
        if after is not None:
            if RUN_NAME.fullmatch(after) is None:
                raise BadInput(
                    f"after: got {after[:100]!r}; allowed: <job>/<run id>, the `next` of a page"
                )
            last = (after.partition("/")[2], after.partition("/")[0])
            rest = [name for name in names if name < last]
        chosen = rest[:limit]
        rows = [row for row in self._read(chosen) if row is not None]
        more = f"{chosen[-1][1]}/{chosen[-1][0]}" if len(rest) > limit else None
        return RunPage(runs=rows, total=len(names), next=more)

    def held_by(self, holder: str, among: int = 200) -> RunRow | None:
        """The newest run whose status names this holder."""
        names = self._all()[:among]
        for start in range(0, len(names), _READERS):
            for row in self._read(names[start : start + _READERS]):
                if row is not None and row.holder == holder:
                    return row
        return None

    def _all(self) -> list[RunName]:
        with self._lock:
            read_at, names = self._names
        if time.monotonic() - read_at < FRESH_S:
            return names
        found = [
            (identifier, job)
            for job in self._store.folders("runs/")
            if re.fullmatch(JOB_PATTERN, job)
            for identifier in self._store.folders(f"runs/{job}/")
            if re.fullmatch(ID_PATTERN, identifier)
        ]
        names = sorted(found, reverse=True)
        with self._lock:
            self._names = time.monotonic(), names
            if len(self._rows) > _KEPT_ROWS:
                self._rows.clear()
        return names

    def _read(self, names: Iterable[RunName]) -> list[RunRow | None]:
        names = list(names)
        now = time.monotonic()
        with self._lock:
            known = {name: self._rows[name] for name in names if name in self._rows}
        old = [name for name in names if name not in known or known[name].until <= now]
        before = [known.get(name) for name in old]
        for name, kept in zip(old, self._readers.map(self._kept, old, before), strict=True):
            known[name] = kept
        with self._lock:
            self._rows |= {name: known[name] for name in old}
        return [known[name].row for name in names]

    def _kept(self, name: RunName, before: _Kept | None) -> _Kept:
        identifier, job = name
        key = f"runs/{job}/{identifier}"
        try:
            status = self._store.get(f"{key}/{Status.FILE}")
        except (FileNotFoundError, CorruptArtefact):
            status = b""
        now = time.monotonic()
        if (
            before is not None
            and before.row is not None
            and before.status == status
            and before.row.state != "running"
        ):
            return dataclasses.replace(before, until=now + ENDED_FRESH_S)
        run = Run(f"{self._store.uri}/{key}", self._settings)
        row = row_of(run)
        if row is None or row.state == "running":
            return _Kept(row, status, now + FRESH_S)
        sealed = row.state == "success" and run.finished()
        return _Kept(row, status, math.inf if sealed else now + ENDED_FRESH_S)


def row_of(run: Run) -> RunRow | None:
    """A run's row; None while the run is being created."""
    try:
        status = run.find(Status)
        if status is None:
            return None
        result = run.find(Result)
        plan = job = None
        with _useful_without(run):
            plan = run.find(Plan) if result is None else None
            job = run.find(RunJob) if result is not None else None
    except CorruptArtefact:
        return RunRow(run=run.uri, id=run.id, job=run.job_name, state="damaged")
    row = RunRow(
        run=run.uri,
        id=run.id,
        job=run.job_name,
        state=shown_state(run, status),
        step=status.step,
        holder=status.holder,
        started_at=status.started_at,
        updated_at=status.updated_at,
        seconds=sum(status.steps.values()),
    )
    predicted = result.predicted if result else plan.predicted if plan else None
    found: dict[str, Any] = {}
    if predicted is not None:
        found |= {
            "predicted_duration_s": predicted.duration_s,
            "predicted_energy_j": predicted.energy_j,
        }
    if plan is not None:
        found |= {"devices": len(plan.devices), "global_batch_size": plan.global_batch_size}
    if result is not None:
        target = job.train.target if job is not None else None
        found |= {
            "stored": run.finished(),
            "metrics": result.metrics,
            "leading_metric": leading_metric(result.metrics, target.metric if target else None),
            "duration_s": result.measured.duration_s,
            "energy_j": result.measured.energy_j,
            "cost": result.measured.cost,
            "devices": len(result.devices),
            "global_batch_size": result.global_batch_size,
            "learning_rate": result.learning_rate,
            "steps": result.steps,
        }
    return row.model_copy(update=found)


@contextlib.contextmanager
def _useful_without(run: Run) -> Iterator[None]:
    """Around reading what a row can lack, unless the run is sealed."""
    try:
        yield
    except CorruptArtefact:
        if run.finished():
            raise
