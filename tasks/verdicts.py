"""What a finished training means: its target reached or missed, boosted trees beaten or not.

Pages, reports and screens say these first.
"""

from __future__ import annotations

from typing import Literal

from trainwright.tasks.runs.artefacts.recommendation import Recommendation
from trainwright.tasks.runs.artefacts.training_result import Result
from trainwright.tasks.runs.value import Value
from trainwright.tasks.spec.metric_names import better_is
from trainwright.tasks.spec.train_spec import Target
from trainwright.tasks.units import metric


class Verdict(Value):
    """One judgement of a run's model."""

    kind: Literal["target", "baseline"]
    good: bool | None
    """None: not known yet"""
    word: str
    """reached, missed, better or worse; for a narrow place"""
    words: str
    """one sentence"""


def verdicts(
    target: Target | None, result: Result | None, recommendation: Recommendation | None
) -> list[Verdict]:
    """The verdict on the job's target, then that of the boosted trees; those that apply."""
    made = [_of_target(target, result), _of_baseline(result, recommendation)]
    return [verdict for verdict in made if verdict is not None]


def _of_target(target: Target | None, result: Result | None) -> Verdict | None:
    if target is None:
        return None
    name = target.metric.replace("_", " ")
    bound = "at least" if better_is(target.metric) == "greater" else "at most"
    wanted = f"{name} {bound} {target.value:,g}"
    reached = result.target_reached if result is not None else None
    value = result.metrics.get(target.metric) if result is not None else None
    if reached is None or value is None:
        return Verdict(kind="target", good=None, word="open", words=f"Target: {wanted}.")
    word = "reached" if reached else "missed"
    return Verdict(
        kind="target",
        good=reached,
        word=word,
        words=f"Target {word}: {name} {metric(value)}; wanted: {bound} {target.value:,g}.",
    )


def _of_baseline(result: Result | None, recommendation: Recommendation | None) -> Verdict | None:
    trees = recommendation.reference if recommendation is not None else None
    name = recommendation.metric if recommendation is not None else None
    value = result.metrics.get(name) if result is not None and name is not None else None
    if trees is None or name is None or value is None:
        return None
    better = value >= trees.metric if better_is(name) == "greater" else value <= trees.metric
    rows = f"{trees.rows:,}"
    if trees.train_rows is not None and trees.train_rows > trees.rows:
        rows += f" of {trees.train_rows:,}"
    ours, theirs, shown = metric(value), metric(trees.metric), name.replace("_", " ")
    trained = f"{trees.library}, {rows} training rows"
    words = (
        f"Not worse than boosted trees: {shown} {ours}, theirs {theirs} ({trained})."
        if better
        else f"Boosted trees are better: {shown} {theirs}, this model {ours} ({trained})."
    )
    word = "not worse" if better else "worse"
    return Verdict(kind="baseline", good=better, word=word, words=words)
