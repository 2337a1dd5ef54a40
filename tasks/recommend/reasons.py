"""Why a candidate has its rank, in words that name figures and neighbours."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trainwright.tasks.recommend.ranking import Contender
from trainwright.tasks.recommend.similar_sets.data_figures import DataFigures, metric_of
from trainwright.tasks.recommend.similar_sets.metric_prediction import MetricPrediction
from trainwright.tasks.recommend.trials.comparison import Comparison
from trainwright.tasks.runs.artefacts.data_schema import DataSchema
from trainwright.tasks.runs.artefacts.recommendation import BoostedTrees
from trainwright.tasks.units import counted, plain, seconds

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
    prediction: MetricPrediction | None,
) -> str:
    """Why the candidate at a place of the order is there."""
    candidate, first = order[place], order[0]
    said = [why_predicted(schema, prediction)]
    if candidate.error is None:
        return said[0]
    if sum(other.error is not None and other.feasible for other in order) == 1:
        said.append("the only candidate that keeps the job's limits")
    elif candidate is first:
        said.append("the least predicted error of all candidates that keep the job's limits")
    elif first.error:
        said.append(
            f"{100 * (candidate.error / first.error - 1):.0f} % more predicted error than "
            f"{first.name}"
        )
    return "; ".join(said)


def why_compared(
    task: str, place: int, order: Sequence[str], comparison: Comparison, objective: str
) -> str:
    """Where a candidate came in a comparison on rows; `order` has their names, the best first."""
    metric, trials = metric_of(task) or "loss", comparison.trials
    trial = trials[order[place]]
    best = min(order, key=lambda name: trials[name].error)
    reached = shown_metric(metric, trial.error) if math.isfinite(trial.error) else "diverged"
    length = (
        f"1/{round(1 / comparison.share)} of its training"
        if comparison.share
        else f"{counted(trial.steps, 'step')}"
    )
    ended = ", which time ended" if trial.clocked else ""
    said = f"{reached} after {length}{ended}, number {place + 1} of {len(order)}"
    if place == 0 and order[0] != best:
        said += (
            f"; row by row as good as {best} ({shown_metric(metric, trials[best].error)}) "
            f"and needs less {_SPENT[objective]}"
        )
    return said


def why_refused(refusal: str, least_deadline_s: float | None, deadline_s: float | None) -> str:
    """Why a candidate has no plan."""
    if least_deadline_s is None or deadline_s is None:
        return refusal
    return f"needs {seconds(least_deadline_s)}; the deadline is {seconds(deadline_s)}"


def against_trees(task: str, name: str, expected: float | None, trees: BoostedTrees) -> str:
    """The boosted trees' verdict. `expected`: the metric that the first candidate will reach."""
    metric = metric_of(task) or "loss"
    part = trees.train_rows is not None and trees.train_rows > trees.rows
    trained = f"{trees.rows:,}{f' of {trees.train_rows:,}' if part else ''} training rows"
    method = f"({trees.library}, {trained}, {seconds(trees.duration_s)})"
    accuracy = metric == "accuracy"
    reached = f"{metric} {trees.metric:.4f}" if accuracy else f"{metric} {plain(trees.metric, 4)}"
    if expected is None:
        return f"boosted trees reach {reached} {method}"
    own = f"{expected:.4f}" if accuracy else plain(expected, 4)
    trees_error, error = (1 - value if accuracy else value for value in (trees.metric, expected))
    better = ""
    if trees_error < error * (1 - _CLEAR):
        gap = abs(expected - trees.metric)
        better = f"are better by {f'{100 * gap:.1f} points' if accuracy else plain(gap)}: they "
    return (
        f"boosted trees {better}reach {reached} {method}; {name}, the recommended model, is "
        f"expected at {own}"
    )
