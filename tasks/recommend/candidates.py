"""The candidates of a recommendation: ranked, each with its figures and the reason for its rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from trainwright.estimator.curves import Interval
from trainwright.tasks.recommend.candidate_costs import Costs
from trainwright.tasks.recommend.ranking import Contender, ranked, ranked_by_rows
from trainwright.tasks.recommend.reasons import why_compared, why_ranked, why_refused
from trainwright.tasks.recommend.similar_sets.data_figures import metric_of
from trainwright.tasks.recommend.similar_sets.metric_prediction import MetricPrediction
from trainwright.tasks.recommend.trials.comparison import Comparison
from trainwright.tasks.recommend.trials.probe import told_apart
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
            why = why_ranked(place, order, schema, prediction)
        else:
            why = why_refused(str(cost.refusal), cost.least_deadline_s, objective.deadline)
        made.append(_candidate(cost, _as_metric(schema.task, prediction), why))
    return made


MOST_COMPARED, MOST_OF_TEMPLATE = 4, 2
"""Candidates that are compared on rows: in all, and of a template."""
_OVERTRAINED = 1.1
"""A whole training may end with this many times the error of a shorter one."""


def foremost(listed: Sequence[Candidate]) -> list[str]:
    """The names of the first candidates that keep the job's limits, few of each template."""
    chosen: list[Candidate] = []
    for candidate in listed:
        of_template = sum(other.template == candidate.template for other in chosen)
        if candidate.feasible and of_template < MOST_OF_TEMPLATE and len(chosen) < MOST_COMPARED:
            chosen.append(candidate)
    return [candidate.name for candidate in chosen]


def alike(listed: Sequence[Candidate]) -> list[str]:
    """The foremost candidates that their predictions do not tell from the first one.

    Those are all whose interval overlaps with the first one's, or that have none.
    """
    first = listed[0].predicted_metric
    return foremost([one for one in listed if _overlap(one.predicted_metric, first)])


def _overlap(first: Interval | None, second: Interval | None) -> bool:
    return (
        first is None or second is None or (first.low <= second.high and second.low <= first.high)
    )


def with_comparison(
    listed: Sequence[Candidate], task: str, comparison: Comparison, objective: str
) -> list[Candidate]:
    """The candidates after a comparison on rows: those that were compared come first."""
    trials = comparison.trials
    named = {candidate.name: candidate for candidate in listed}
    errors = {name: trial.error for name, trial in trials.items()}
    order = ranked_by_rows(
        errors,
        {name: _spent(named[name], objective) for name in trials},
        lambda best, name: told_apart(trials[best], trials[name]),
    )
    compared = [
        named[name].model_copy(
            update={
                "probed_metric": as_metric(task, errors[name])
                if math.isfinite(errors[name])
                else None,
                "predicted_metric": _bounded(task, named[name].predicted_metric, errors[name]),
                "why": f"{why_compared(task, place, order, comparison, objective)}; "
                f"{named[name].why}",
            }
        )
        for place, name in enumerate(order)
    ]
    return [*compared, *(candidate for candidate in listed if candidate.name not in trials)]


def _spent(candidate: Candidate, objective: str) -> float:
    """The median of what the job minimises."""
    spent = {"energy": candidate.energy_j, "cost": candidate.cost}.get(objective)
    spent = spent or candidate.duration_s
    return spent.median if spent else math.inf


def _bounded(task: str, metric: Interval | None, error: float) -> Interval | None:
    """A prediction after a short training with this error, which a whole one hardly exceeds."""
    if metric is None or not math.isfinite(error):
        return metric
    low, median, high = sorted(
        as_metric(task, one) for one in (metric.low, metric.median, metric.high)
    )
    bounded = min(low, error), min(median, error), min(high, error * _OVERTRAINED)
    ends = sorted(as_metric(task, one) for one in bounded)
    return Interval(low=ends[0], median=ends[1], high=ends[2])


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
