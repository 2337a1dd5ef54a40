"""Answers about runs, apart from HTTP: lists, a run's documents, its recorded rows, history."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
from pathlib import Path
from typing import Any

from trainwright.estimator.structure import Structure
from trainwright.tasks.allocate.timeline.measured_step import MeasuredStep
from trainwright.tasks.allocate.timeline.simulated_plan import simulated_plan
from trainwright.tasks.allocate.timeline.timeline_svg import timeline_svg
from trainwright.tasks.analyze.prediction_check import predicted_and_measured
from trainwright.tasks.errors import BadInput, ServiceUnreachable
from trainwright.tasks.leases.ledger import Ledger
from trainwright.tasks.leases.waiting_place import waiting_place
from trainwright.tasks.runs.artefacts.data_profile import Drift
from trainwright.tasks.runs.artefacts.estimate import Estimate
from trainwright.tasks.runs.artefacts.learning_rate_search import LearningRateSearch
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.runs.artefacts.run_job import RunJob
from trainwright.tasks.runs.artefacts.training_result import Result
from trainwright.tasks.runs.artefacts.validation import REJECTION, Validation
from trainwright.tasks.runs.exports import exported_file
from trainwright.tasks.runs.listing import MOST_ROWS, Listing, RunRow
from trainwright.tasks.runs.run import Run
from trainwright.tasks.settings import Settings
from trainwright.tasks.spec.metric_names import better_is
from trainwright.tasks.summary import summary
from trainwright.tasks.train.record import live
from trainwright.tasks.train.record.metrics import warm_up
from trainwright.tasks.train.record.pace import progress_of
from trainwright.tasks.train.record.waiting_hosts import waiting_hosts
from trainwright.tasks.units import is_rough
from trainwright.tasks.validate.rejection_page import drifted_columns, failures


class NotFound(BadInput):
    """Nothing exists at this address."""

    kind = "not_found"


_NEWEST_RUNS = 200
"""among which those that wait for hosts are looked for"""
_AS_IMAGE = 'xmlns="http://www.w3.org/2000/svg"'
"""What SVG needs as an image of its own."""


class Records:
    """Answers about the runs of the settings' store. Uses threads, because stores are slow."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._listing: Listing | None = None
        self._parts = live.Parts()

    async def start(self) -> None:
        """Import what reading rows needs, so that the first chart is fast."""
        await asyncio.to_thread(warm_up)

    def close(self) -> None:
        """End its threads."""
        if self._listing is not None:
            self._listing.close()

    async def runs(
        self, limit: int, after: str | None, job: str | None, holder: str | None
    ) -> bytes:
        """A page of the list of runs; with `holder`, the newest run of that holder."""
        return await asyncio.to_thread(self._runs, limit, after, job, holder)

    async def run(self, job: str, identifier: str) -> bytes:
        """`trainwright show --json`, with the run's documents and events. Raises NotFound."""
        return await asyncio.to_thread(lambda: _json(self._run(job, identifier)))

    async def metrics(self, job: str, identifier: str, from_step: int) -> bytes:
        """Rows of steps and epochs (`live.recorded`). Raises NotFound."""
        return await asyncio.to_thread(self._metrics, job, identifier, from_step)

    async def structure(self, job: str, identifier: str) -> bytes:
        """The content of structure.json. Raises NotFound."""
        return await asyncio.to_thread(lambda: self._file(job, identifier, Structure.FILE))

    async def report(self, job: str, identifier: str) -> bytes:
        """The run's report, in HTML. Raises NotFound."""
        return await asyncio.to_thread(lambda: self._file(job, identifier, "report/report.html"))

    async def timeline(self, job: str, identifier: str) -> bytes:
        """One step of the run's plan, rank by rank, as SVG. Raises NotFound."""
        return await asyncio.to_thread(self._timeline, job, identifier)

    async def exported(self, job: str, identifier: str, kind: str, file: str) -> bytes:
        """A file of a sealed export of the run, verified. Raises NotFound, CorruptArtefact."""
        return await asyncio.to_thread(self._exported, job, identifier, kind, file)

    async def rejection(self, job: str, identifier: str) -> bytes:
        """The page of the run's rejected data, in HTML. Raises NotFound."""
        return await asyncio.to_thread(lambda: self._file(job, identifier, REJECTION))

    async def waiting_hosts(self, pool: str) -> list[dict[str, Any]]:
        """The hosts in a cluster's queue that running jobs with a pool file of this name wait for.

        A run on another machine is included once its events are stored.
        """
        return await asyncio.to_thread(self._waiting_hosts, pool)

    async def history(self, job: str | None) -> bytes:
        """The outcomes of each job, and the finished runs, oldest first."""
        return await asyncio.to_thread(self._history, job)

    def _list(self) -> Listing:
        if self._listing is None:
            self._listing = Listing(self._settings.store, self._settings)
        return self._listing

    def _runs(self, limit: int, after: str | None, job: str | None, holder: str | None) -> bytes:
        if holder is not None:
            row = self._list().held_by(holder)
            rows = [row.model_dump(mode="json")] if row else []
            return _json({"runs": rows, "total": len(rows), "next": None})
        return self._list().page(limit, after, job).model_dump_json().encode()

    def found(self, job: str, identifier: str) -> Run:
        """A run of the store. Raises NotFound."""
        run = Run(f"{self._list().uri}/runs/{job}/{identifier}", self._settings)
        if not run.exists():
            raise NotFound(f"run: got {job}/{identifier}; no such run")
        return run

    def _run(self, job: str, identifier: str) -> dict[str, Any]:
        run = self.found(job, identifier)
        status, plan, result, estimate = (
            run.status(),
            run.find(Plan),
            run.find(Result),
            run.find(Estimate),
        )
        search, validation = run.find(LearningRateSearch), run.find(Validation)
        return summary(run) | {
            "id": run.id,
            "job_file": run.read(RunJob).model_dump(mode="json"),
            "job_used": run.job().model_dump(mode="json"),
            "waiting": _waiting(run) if status.state == "running" else None,
            "failures": failures(validation) if validation and not validation.success else [],
            "step": status.step,
            "updated_at": status.updated_at,
            "plan": plan.model_dump(mode="json") if plan else None,
            "estimate_mode": estimate.mode if estimate else None,
            "result": result.model_dump(mode="json") if result else None,
            "predicted_and_measured": predicted_and_measured(result, estimate, plan)
            if result
            else [],
            "learning_rate_search": search.model_dump(mode="json") if search else None,
            "data": validation.data.model_dump(mode="json")
            if validation and validation.data
            else None,
            "drift": _drift(validation.drift) if validation else None,
            "events": live.happened(run, running=status.state == "running"),
        }

    def _metrics(self, job: str, identifier: str, from_step: int) -> bytes:
        run = self.found(job, identifier)
        running = run.status().state == "running"
        found = live.recorded(run, self._parts, from_step, running=running)
        plan = run.find(Plan) if running else None
        going = progress_of(found, plan.steps_per_epoch, plan.epochs) if plan else None
        return _json(found | {"progress": going})

    def _file(self, job: str, identifier: str, name: str) -> bytes:
        try:
            return self.found(job, identifier).objects.get(name)
        except FileNotFoundError:
            raise NotFound(f"run: {job}/{identifier} has no {name} yet") from None

    def _timeline(self, job: str, identifier: str) -> bytes:
        run = self.found(job, identifier)
        plan, estimate = run.find(Plan), run.find(Estimate)
        if plan is None or estimate is None:
            raise NotFound(f"run: {job}/{identifier} has no plan yet")
        try:
            measured = MeasuredStep.of(run.find(Result))
            return timeline_svg(simulated_plan(plan, estimate), measured).encode()
        except BadInput as error:
            raise NotFound(str(error)) from None

    def _exported(self, job: str, identifier: str, kind: str, file: str) -> bytes:
        try:
            return exported_file(self.found(job, identifier), kind, file)
        except FileNotFoundError:
            raise NotFound(
                f"run: {job}/{identifier} has no export {kind} with a file {file}"
            ) from None

    def _waiting_hosts(self, pool: str) -> list[dict[str, Any]]:
        found = []
        for row in self._list().page(_NEWEST_RUNS).runs:
            if row.state != "running":
                continue
            run = Run(row.run, self._settings)
            used = run.read(RunJob).pool
            if used is None or Path(used).stem != pool:
                continue
            found += [
                {
                    "run": row.run,
                    "holder": row.holder,
                    "host": event["host"],
                    "reported_at": event["at"],
                    "message": event["message"],
                }
                for event in waiting_hosts(live.happened(run))
            ]
        return found

    def _history(self, job: str | None) -> bytes:
        rows = self._list().page(MOST_ROWS, None, job).runs
        by_job: dict[str, list[RunRow]] = {}
        for row in rows:
            by_job.setdefault(row.job, []).append(row)
        finished = [row for row in reversed(rows) if row.duration_s is not None]
        return _json(
            {
                "jobs": [_outcomes(name, own) for name, own in sorted(by_job.items())],
                "runs": [row.model_dump(mode="json") for row in finished],
            }
        )


def _outcomes(job: str, rows: list[RunRow]) -> dict[str, Any]:
    """The outcomes of a job's runs, newest first."""
    done = [row for row in rows if row.duration_s is not None]
    ratios = [
        guess.median / row.duration_s - 1
        for row in done
        if (guess := row.predicted_duration_s)
        and row.duration_s
        and not is_rough(guess.low, guess.high)
    ]
    metric = done[0].leading_metric if done else None
    results = [row.metrics[metric] for row in done if metric is not None and metric in row.metrics]
    best = max if metric is not None and better_is(metric) == "greater" else min
    return {
        "job": job,
        "runs": len(rows),
        "succeeded": sum(row.state == "success" for row in rows),
        "failed": sum(row.state == "failed" for row in rows),
        "running": sum(row.state == "running" for row in rows),
        "median_duration_s": _median([row.duration_s for row in done]),
        "median_energy_j": _median([row.energy_j for row in done]),
        "median_duration_error": _median(ratios),
        "best_accuracy": max(
            (row.metrics["accuracy"] for row in done if "accuracy" in row.metrics), default=None
        ),
        "best_metric": metric,
        "best": best(results, default=None),
        "newest": rows[0].id,
    }


def _waiting(run: Run) -> dict[str, Any] | None:
    """The run's place in the queue for devices; None if it does not wait, or if it is not known."""
    try:
        return waiting_place(run.uri, Ledger(run.settings.ledger_url))
    except ServiceUnreachable:
        return None


def _drift(drift: Drift | None) -> dict[str, Any] | None:
    """The comparison of a run's data with its reference; None if there was none."""
    if drift is None or drift.reference is None:
        return None
    columns = [
        {"line": line, "picture": drawn.replace("<svg", f"<svg {_AS_IMAGE}", 1)}
        for line, drawn in drifted_columns(drift)
    ]
    return {"reference": drift.reference, "compared": len(drift.columns), "columns": columns}


def _json(document: Any) -> bytes:
    return json.dumps(_finite(document), allow_nan=False).encode()


def _finite(value: Any) -> Any:
    """The value for JSON: null for NaN and infinity, which JSON lacks."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value


def _median(values: list[float | None] | list[float]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
