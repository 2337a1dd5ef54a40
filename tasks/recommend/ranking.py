"""The order of candidates: pure functions. Accuracy comes first, cost only where it is equal."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

AS_GOOD = 0.02
"""Candidates whose errors differ by more than this share are never equally good."""


@dataclass(frozen=True)
class Contender:
    """What decides a candidate's rank."""

    name: str
    feasible: bool
    """whether a plan keeps the job's limits"""
    error: float | None
    """predicted; None: unknown"""
    spend: float
    """what the job minimises: seconds, J or money"""
    prior: int = 0
    """the order of candidates whose error is unknown"""


def ranked(contenders: Sequence[Contender]) -> list[Contender]:
    """Best first by predicted error, those whose error is unknown after them by their prior.

    Of equal errors, the candidate that spends less comes first. Those that miss a limit come last,
    in order of what they spend.
    """
    fit = [one for one in contenders if one.feasible]
    return [
        *sorted(
            (one for one in fit if one.error is not None),
            key=lambda one: (_error(one), one.spend, one.name),
        ),
        *sorted((one for one in fit if one.error is None), key=lambda one: (one.prior, one.name)),
        *sorted(
            (one for one in contenders if not one.feasible), key=lambda one: (one.spend, one.name)
        ),
    ]


def _error(one: Contender) -> float:
    return math.inf if one.error is None else one.error


def ranked_by_rows(
    errors: Mapping[str, float],
    spend: Mapping[str, float],
    told_apart: Callable[[str, str], bool],
) -> list[str]:
    """The candidates that were compared on rows, best first.

    Those that are as good as the one with the least error come first, by what they spend; then the
    others by error. A candidate is as good if its error is within `AS_GOOD` and
    `told_apart(best, name)`, a paired comparison, is false.
    """
    by_error = sorted(errors, key=lambda name: (errors[name], spend[name], name))
    if not by_error:
        return []
    best = by_error[0]
    as_good = [
        name
        for name in by_error
        if name == best
        or (errors[name] <= errors[best] * (1 + AS_GOOD) and not told_apart(best, name))
    ]
    return [
        *sorted(as_good, key=lambda name: (spend[name], errors[name], name)),
        *(name for name in by_error if name not in as_good),
    ]
