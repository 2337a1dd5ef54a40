"""Why a candidate has its rank, in words that name figures and neighbours."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from trainwright.tasks.recommend.ranking import AS_GOOD, Contender
from trainwright.tasks.recommend.similar_sets.data_figures import DataFigures, metric_of
from trainwright.tasks.recommend.similar_sets.metric_prediction import MetricPrediction
from trainwright.tasks.runs.artefacts.data_schema import DataSchema
from trainwright.tasks.runs.artefacts.recommendation import BoostedTrees
from trainwright.tasks.units import amount, plain, seconds

_SPENT = {"energy": "energy", "cost": "cost", "time": "time"}
_CLEAR = 0.01
"""The boosted trees win if their error is lower by more than this share."""


def shown_metric(metric: str, error: float) -> str:
    """An error as its metric, as in `accuracy 0.9722`."""
    return f"{metric} {1 - error:.4f}" if metric == "accuracy" else f"{metric} {plain(error, 4)}"


def described_data(schema: DataSchema, figures: DataFigures) -> str:
    """The data in one sentence: rows, columns, target, and how far simple methods get."""
    kinds = [one.kind for one in schema.columns]
    counts = [f"{kinds.count(kind)} of {kind}" for kind in dict.fromkeys(kinds)]
    shape = [f"{'×'.join(map(str, size))} {name}" for name, size in schema.inputs.items()]
    columns = f"columns: {', '.join(counts)}" if counts else f"inputs: {', '.join(shape)}"
    gaps = f", {100 * figures['missing']:.1f} % missing" if figures["missing"] else ""
    target = f", {len(schema.classes)} classes" if schema.classes else ""
    metric = metric_of(schema.task) or "loss"
    first = figures["constant_error"]
    simple = [
        f"{words} {shown_metric(metric, first * share)}"
        for words, share in (
            ("a constant", 1.0),
            ("a ridge regression", figures["linear_error"]),
            ("the nearest rows", figures["neighbour_error"]),
        )
    ]
    return (
        f"{schema.train_rows:,} training rows, {columns}{gaps}{target}; "
        f"on a sample: {', '.join(simple)}"
    )


def compared_with(prediction: MetricPrediction | None) -> str:
    """Where a prediction comes from."""
    if prediction is None:
        return "the benchmark has too few data sets of this task with this model for a prediction"
    nearest = ", ".join(prediction.neighbours)
    if prediction.far:
        return (
            f"this data is unlike all {prediction.sets} data sets of the benchmark (the nearest: "
            f"{nearest}), so the interval is wide"
        )
    return f"from {prediction.sets} data sets, of which {nearest} are the most similar"


def why_predicted(schema: DataSchema, prediction: MetricPrediction | None) -> str:
    """What a model is predicted to reach, and from which data sets: the same on every machine."""
    if prediction is None:
        return (
            f"{compared_with(prediction)}; placed by its template and its size for "
            f"{schema.train_rows:,} training rows"
        )
    metric = metric_of(schema.task) or "loss"
    error = prediction.error
    low, high = (
        shown_metric(metric, one).removeprefix(f"{metric} ")
        for one in sorted((error.low, error.high), reverse=metric == "accuracy")
    )
    return (
        f"predicted {shown_metric(metric, error.median)} (80 % interval: {low} to {high}), "
        f"{compared_with(prediction)}"
    )


def why_ranked(
    place: int,
    order: Sequence[Contender],
    schema: DataSchema,
    objective: str,
    prediction: MetricPrediction | None,
) -> str:
    """Why the candidate at a place of the order is there."""
    one, first = order[place], order[0]
    said = [why_predicted(schema, prediction)]
    if one.error is None:
        return said[0]
    known = [other for other in order if other.error is not None and other.feasible]
    best = min(known, key=lambda other: other.error or 0.0)
    assert best.error is not None
    if one is first and one is not best:
        said.append(
            f"as good as {best.name} within {100 * AS_GOOD:.0f} % of its error, for "
            f"{_times(one.spend, best.spend)} of its {_SPENT[objective]}"
        )
    elif len(known) == 1:
        said.append("the only candidate that keeps the job's limits")
    elif one is first:
        said.append("the least error of all candidates that keep the job's limits")
    elif first.error is not None and one.error <= best.error * (1 + AS_GOOD):
        said.append(
            f"as good as {first.name}, for {_times(one.spend, first.spend)} of its "
            f"{_SPENT[objective]}"
        )
    elif first.error:
        said.append(f"{100 * (one.error / first.error - 1):.0f} % more error than {first.name}")
    return "; ".join(said)


def why_probed(task: str, name: str, errors: Mapping[str, float]) -> str:
    """Where a candidate came in a probe; `errors` are in its order."""
    metric = metric_of(task) or "loss"
    place = list(errors).index(name)
    reached = errors[name]
    said = shown_metric(metric, reached) if math.isfinite(reached) else "diverged"
    return f"{said} in a short training on a sample, number {place + 1} of {len(errors)}"


def why_refused(refusal: str, least_deadline_s: float | None, deadline_s: float | None) -> str:
    """Why a candidate has no plan."""
    if least_deadline_s is None or deadline_s is None:
        return refusal
    return f"needs {seconds(least_deadline_s)}; the deadline is {seconds(deadline_s)}"


def against_trees(
    task: str, name: str, error: float | None, trees: BoostedTrees, known: str
) -> str:
    """How the first candidate compares with the boosted trees. `known`: predicted or probed."""
    metric = metric_of(task) or "loss"
    reached = 1 - trees.metric if metric == "accuracy" else trees.metric
    part = trees.train_rows is not None and trees.train_rows > trees.rows
    trained = f"{trees.rows:,}{f' of {trees.train_rows:,}' if part else ''} training rows"
    said = (
        f"boosted trees ({trees.library}, {trained}, {seconds(trees.duration_s)}): "
        f"{shown_metric(metric, reached)}"
    )
    if error is None:
        return said
    compared = f"{name}, {known}: {shown_metric(metric, error)}"
    if reached < error * (1 - _CLEAR):
        return f"{said}; the boosted trees win by {_gap(metric, error - reached)} ({compared})"
    return f"{said}; they do not win ({compared})"


def _gap(metric: str, value: float) -> str:
    return f"{100 * value:.1f} points" if metric == "accuracy" else f"{metric} {plain(value)}"


def _times(one: float, other: float) -> str:
    return f"{100 * one / other:.0f} %" if other else amount(one)
