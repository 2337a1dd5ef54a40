"""A made-up recommendation, for tests of what shows it."""

from __future__ import annotations

from trainwright.estimator.curves import Interval
from trainwright.tasks.runs.artefacts.recommendation import Candidate, Recommendation


def recommendation() -> Recommendation:
    """One candidate, whose reason has characters that HTML must escape."""
    first = Candidate(
        name="linear-small",
        template="linear",
        size="small",
        config={},
        recipe={"train.epochs": 30},
        parameters=12,
        predicted_metric=Interval(median=0.9, low=0.8, high=0.95),
        feasible=True,
        duration_s=Interval(median=6, low=3, high=20),
        why="it <is> the simplest",
    )
    return Recommendation(
        task="tabular-classification",
        metric="accuracy",
        candidates=[first],
        chosen=first.name,
        reason="the data has a & b",
        recipe=first.recipe,
    )
