"""Step `promote`: points an alias, such as `production`, at a finished run's model if it is better.

Serving follows `<store>/models/<job>/alias-<name>.json`. The file changes only by compare-and-swap:
if two runs finish at once, the better one stays, in whichever order they write.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

from pydantic import Field

from trainwright.tasks.errors import BadInput, CorruptArtefact, ServiceUnreachable
from trainwright.tasks.runs.alias import Alias, alias_key, find_alias
from trainwright.tasks.runs.artefacts.artefact import Artefact
from trainwright.tasks.runs.run import Run, now
from trainwright.tasks.settings import Settings
from trainwright.tasks.spec.documents import validated
from trainwright.tasks.spec.job import Job, JobName, Promotion
from trainwright.tasks.spec.metric_names import better_is
from trainwright.tasks.store import verify

_TRIES = 10


class Decision(Artefact):
    """Whether an alias moves to a run's model, and why."""

    FILE = ""
    promoted: bool
    alias: str | None
    reason: str
    metric: str | None = None
    value: float | None = None
    current: str | None = Field(
        default=None, description="the run that the alias pointed at before the decision"
    )
    current_value: float | None = None


def metric_of(job: Job) -> str | None:
    """The metric that compares the job's models; None if the job has none.

    It is promotion.only_if_better, else the metric of train.target.
    """
    if job.promotion is not None and job.promotion.only_if_better is not None:
        return job.promotion.only_if_better
    return job.train.target.metric if job.train.target is not None else None


def model_metrics(run: Run) -> dict[str, float]:
    """The metrics of the stored model, which is the best checkpoint's if it was kept.

    Raises CorruptArtefact.
    """
    try:
        found = json.loads(run.objects.get("model/signature.json"))["metrics"]
        return {str(name): float(value) for name, value in found.items()}
    except FileNotFoundError:
        raise CorruptArtefact(f"{run.uri}: has no model; the step `store` writes it") from None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise CorruptArtefact(f"{run.uri}/model/signature.json: is damaged") from None


def decide(
    run: Run, name: str | None = None, alias: str | None = None
) -> tuple[Decision, str | None]:
    """Whether the alias would move to the run's model now, and the alias's version tag.

    Alias and metric are the job's; `name` and `alias` replace the job's own. Raises BadInput or
    CorruptArtefact.
    """
    job = run.job()
    chosen = alias or (job.promotion.alias if job.promotion is not None else None)
    if chosen is None:
        return Decision(promoted=False, alias=None, reason="the job has no `promotion`"), None
    chosen = validated(Promotion, {"alias": chosen}, "promotion").alias
    current, version = find_alias(run.root(), checked_name(name, job), chosen)
    return compare(run.uri, chosen, metric_of(job), model_metrics(run), current), version


def checked_name(name: str | None, job: Job) -> str:
    """The job name under which the alias is kept: the job's own, or `name`. Raises BadInput."""
    return job.name if name is None else validated(JobName, {"name": name}, "promotion").name


def compare(
    run: str, alias: str, metric: str | None, metrics: dict[str, float], current: Alias | None
) -> Decision:
    """The decision, from both models' metrics. Equal is not better; nor is a value not finite."""
    if metric is not None and metric not in metrics:
        raise BadInput(
            f"promotion.only_if_better: got {metric!r}; "
            f"allowed: a metric of the run, one of {', '.join(sorted(metrics))}"
        )
    value = metrics[metric] if metric is not None else None
    known: dict[str, Any] = {
        "alias": alias,
        "metric": metric,
        "value": value if value is not None and math.isfinite(value) else None,
    }
    if value is not None and not math.isfinite(value):
        return Decision(promoted=False, reason=f"{metric} is {value}", **known)
    if current is None:
        return Decision(promoted=True, reason=f"{alias} points at no model yet", **known)
    before = current.metrics.get(metric) if metric is not None else None
    known |= {"current": current.run, "current_value": before}
    if current.run == run:
        return Decision(promoted=True, reason=f"{alias} already points at this run", **known)
    if value is None or before is None:
        why = (
            "the job has no metric for the comparison"
            if value is None
            else f"the current model has no {metric}"
        )
        return Decision(promoted=True, reason=why, **known)
    less = better_is(str(metric)) == "less"
    if value < before if less else value > before:
        return Decision(
            promoted=True, reason=f"{metric} {value:.6g} is better than {before:.6g}", **known
        )
    return Decision(
        promoted=False, reason=f"{metric} {value:.6g} is not better than {before:.6g}", **known
    )


def promote(
    run: Run, name: str | None = None, alias: str | None = None, *, approved: bool = False
) -> dict[str, Any]:
    """Point the alias at this run's model if `decide` says so.

    Returns whether it did, and why. Raises CorruptArtefact if the run is not sealed, or differs
    from what was sealed; BadInput if it lacks the metric, or if the job requires an approval and
    `approved` is false.
    """
    root, name = run.root(), checked_name(name, run.job())
    decision, version = decide(run, name, alias)
    if decision.alias is not None:
        verify(run)
    for _ in range(_TRIES):
        if decision.alias is None or not decision.promoted or decision.current == run.uri:
            return _reference(run, name, decision)
        if run.job().needs_approval and not approved:
            raise BadInput(
                f"promotion.require_approval: {run.uri} is not approved for {decision.alias}; "
                "allowed: a person's approval"
            )
        taken = Alias(
            alias=decision.alias,
            job=run.job_name,
            run=run.uri,
            metrics=model_metrics(run),
            promoted_at=now(),
            previous=decision.current,
        )
        if root.swap(
            alias_key(name, taken.alias), taken.model_dump_json(indent=1).encode(), version
        ):
            return _reference(run, name, decision)
        decision, version = decide(run, name, alias)  # the alias changed: is this still better?
    raise ServiceUnreachable(
        f"{root.uri}/{alias_key(name, str(decision.alias))}: "
        f"other processes changed it during all {_TRIES} attempts"
    )


def best_of(runs: Iterable[str], settings: Settings) -> dict[str, Any]:
    """The run with the best model among finished runs, and the ranking, best first.

    The metric is that of the first run's job. Raises BadInput if there is no run, if the job has no
    metric, or if a run lacks it.
    """
    found = [Run(uri, settings) for uri in runs]
    metric = metric_of(found[0].job()) if found else None
    if metric is None:
        raise BadInput(
            "candidates: no run, or a job without promotion.only_if_better and train.target; "
            "allowed: jobs with one of them"
        )
    values = {run.uri: model_metrics(run).get(metric) for run in found}
    lacking = [uri for uri, value in values.items() if value is None]
    if lacking:
        raise BadInput(f"candidates: {lacking[0]} has no {metric}; allowed: runs that have it")
    sign = 1.0 if better_is(metric) == "less" else -1.0
    ranks = sorted(
        values, key=lambda uri: (not math.isfinite(values[uri] or 0.0), sign * (values[uri] or 0.0))
    )
    ranking = [{"run": uri, "value": values[uri]} for uri in ranks]
    return {"run": ranks[0], "metric": metric, "value": values[ranks[0]], "ranking": ranking}


def _reference(run: Run, name: str, decision: Decision) -> dict[str, Any]:
    where = alias_key(name, decision.alias) if decision.alias else None
    return {
        "run": run.uri,
        "artefact": where,
        **decision.model_dump(mode="json", exclude={"schema_version"}),
    }
