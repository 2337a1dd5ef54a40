"""The candidates of a recommendation: ranked, each with its figures and the reason for its rank."""

from __future__ import annotations

import math
from collections.abc import Mapping

from trainwright.estimator.curves import Interval
from trainwright.tasks.recommend.candidate_costs import Costs
from trainwright.tasks.recommend.ranking import Contender, ranked
from trainwright.tasks.recommend.reasons import why_probed, why_ranked, why_refused
from trainwright.tasks.recommend.similar_sets.data_figures import metric_of
from trainwright.tasks.recommend.similar_sets.metric_prediction import MetricPrediction
from trainwright.tasks.runs.artefacts.data_schema import DataSchema
from trainwright.tasks.runs.artefacts.recommendation import Candidate
from trainwright.tasks.spec.objective import Objective

Predictions = Mapping[str, MetricPrediction | None]


def candidates(
    schema: DataSchema, objective: Objective, costs: Mapping[str, Costs], predictions: Predictions
) -> list[Candidate]:
    """The candidates by name, best first; those that miss a limit come last."""
    order = ranked(
        [
            Contender(
                name,
                one.plan is not None,
                found.error.median if (found := predictions[name]) else None,
                one.spend(objective.minimize),
                one.proposal.prior,
            )
            for name, one in costs.items()
        ]
    )
    made = []
    for place, one in enumerate(order):
        cost, prediction = costs[one.name], predictions[one.name]
        if one.feasible:
            why = why_ranked(place, order, schema, objective.minimize, prediction)
        else:
            why = why_refused(str(cost.refusal), cost.least_deadline_s, objective.deadline)
        made.append(_candidate(cost, _as_metric(schema.task, prediction), why))
    return made


def with_probe(listed: list[Candidate], task: str, errors: Mapping[str, float]) -> list[Candidate]:
    """The candidates after a probe: those that were tried come first, in its order."""
    named = {one.name: one for one in listed}
    tried = []
    for name, error in errors.items():
        metric = as_metric(task, error) if math.isfinite(error) else None
        why = f"{why_probed(task, name, errors)}; {named[name].why}"
        tried.append(named[name].model_copy(update={"probed_metric": metric, "why": why}))
    return [*tried, *(one for one in listed if one.name not in errors)]


def as_metric(task: str, error: float) -> float:
    """An error as the task's metric, and a metric as an error."""
    return 1 - error if metric_of(task) == "accuracy" else error


def _as_metric(task: str, prediction: MetricPrediction | None) -> Interval | None:
    if prediction is None:
        return None
    error = prediction.error
    ends = sorted(as_metric(task, one) for one in (error.low, error.high))
    return Interval(median=as_metric(task, error.median), low=ends[0], high=ends[1])


def _candidate(costs: Costs, metric: Interval | None, why: str) -> Candidate:
    proposal = costs.proposal
    return Candidate(
        name=proposal.name,
        template=proposal.template.name,
        size=proposal.size,
        config=dict(proposal.config),
        recipe=dict(proposal.recipe),
        parameters=costs.parameters,
        predicted_metric=metric,
        feasible=costs.plan is not None,
        duration_s=costs.duration_s,
        energy_j=costs.energy_j,
        cost=costs.cost,
        least_deadline_s=costs.least_deadline_s,
        why=why,
    )
