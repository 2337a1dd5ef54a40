"""The summary of a run that `run`, `train`, `show` and the page display."""

from __future__ import annotations

from typing import Any

from trainwright.tasks.runs.artefacts.estimate import Estimate
from trainwright.tasks.runs.artefacts.learning_rate_search import LearningRateSearch
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.runs.artefacts.recommendation import Recommendation
from trainwright.tasks.runs.artefacts.run_job import RunJob
from trainwright.tasks.runs.artefacts.training_result import Result
from trainwright.tasks.runs.exports import sealed_exports
from trainwright.tasks.runs.run import Run, job_of
from trainwright.tasks.runs.run_state import shown_state
from trainwright.tasks.spec.recipe import used_recipe
from trainwright.tasks.spec.train_spec import TrainSpec
from trainwright.tasks.train.checkpoint import fence
from trainwright.tasks.trained_with import RunFacts, trained_with
from trainwright.tasks.verdicts import verdicts


def summary(run: Run) -> dict[str, Any]:
    """A run's state, metrics, predicted and measured values, devices, and file locations."""
    status, result, plan, search = (
        run.status(),
        run.find(Result),
        run.find(Plan),
        run.find(LearningRateSearch),
    )
    estimate, stored, recommendation = (
        run.find(Estimate),
        run.read(RunJob),
        run.find(Recommendation),
    )
    job = job_of(stored, recommendation)
    target = job.train.target
    facts = RunFacts(stored, job, recommendation, plan, search, result)
    kept = _checkpoints(run, result)
    files = {item.key for item in run.objects.list("report/")}
    document: dict[str, Any] = {
        "run": run.uri,
        "job": run.job_name,
        "state": shown_state(run, status),
        "holder": status.holder,
        "started_at": status.started_at,
        "metrics": result.metrics if result else {},
        "verdicts": [
            verdict.model_dump(mode="json") for verdict in verdicts(target, result, recommendation)
        ],
        "trained_with": [field.model_dump(mode="json") for field in trained_with(facts)],
        "model_of": result.model_in_words if result else None,
        "predicted": plan.predicted.model_dump(mode="json") if plan and plan.predicted else None,
        "currency": plan.currency if plan else None,
        "learned_from": estimate.learned_from if estimate else 0,
        "measured": result.measured.model_dump(mode="json") if result else None,
        "steps": status.steps,
        "devices": [device.model_dump(mode="json") for device in result.devices] if result else [],
        "planned": [device.model_dump(mode="json") for device in plan.devices] if plan else [],
        "recommended": _recommended(recommendation, job.train),
        "learning_rate": search.learning_rate if search else None,
        "learning_rate_reason": search.reason if search else None,
        "learning_rate_plot": f"{run.uri}/{search.plot}" if search and search.plot else None,
        "global_batch_size": plan.global_batch_size if plan else None,
        "layout": _layout(plan) if plan else None,
        "target": target.model_dump(mode="json") if target else None,
        "target_reached": result.target_reached if result else None,
        "early_stopped": result.early_stopped.model_dump(mode="json")
        if result and result.early_stopped
        else None,
        "split_events": [event.model_dump(mode="json") for event in result.split_events]
        if result
        else [],
        "trained_steps": result.steps if result else max(kept, default=None),
        "checkpoints": [f"{run.uri}/{path}" for path in kept.values()],
        "report": f"{run.uri}/report/report.html" if "report/report.html" in files else None,
        "exports": [one.model_dump(mode="json") for one in sealed_exports(run)],
        "manifest": f"{run.uri}/manifest.json" if run.finished() else None,
    }
    if status.error is not None:
        document["error"] = status.error
    return document


def _layout(plan: Plan) -> dict[str, Any] | None:
    """The plan's layout, why it was chosen, and why others were not; None if it has none."""
    if plan.layout is None:
        return None
    return {
        "name": plan.layout.name,
        "words": plan.layout_in_words,
        "rule": plan.layout_rule,
        "by_layer": [one.model_dump(mode="json") for one in plan.by_layer],
        "others": [
            {"name": one.layout, "words": one.layout_in_words, "reason": one.reason}
            for one in plan.alternatives
            if one.layout_in_words
        ],
    }


def _recommended(found: Recommendation | None, train: TrainSpec) -> dict[str, Any] | None:
    """The recommended model and what the run uses of its recipe; None if the job names a model."""
    if found is None or found.chosen is None:
        return None
    first = found.candidates[0].model_dump(mode="json")
    return {
        "name": found.chosen,
        "metric": found.metric,
        "predicted_metric": first["predicted_metric"],
        "why": first["why"],
        "recipe": used_recipe(found.recipe, train),
        "notes": found.notes,
    }


def _checkpoints(run: Run, result: Result | None) -> dict[int, str]:
    """The checkpoints by step; without a result, those from which the next training can resume."""
    if result is not None:
        return {checkpoint.step: checkpoint.path for checkpoint in result.checkpoints}
    index, _ = fence.read_index(run.objects)
    return {entry.step: fence.folder_name(entry.step) for entry in index.checkpoints}
