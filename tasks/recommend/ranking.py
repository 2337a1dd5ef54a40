"""The order of candidates: a pure function."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

AS_GOOD = 0.02
"""Candidates whose errors differ by less than this share count as equally good."""


@dataclass(frozen=True)
class Contender:
    """What decides a candidate's rank."""

    name: str
    feasible: bool
    """whether a plan keeps the job's limits"""
    error: float | None
    """predicted or probed; None: unknown"""
    spend: float
    """what the job minimises: seconds, J or money"""
    prior: int = 0
    """the order of candidates whose error is unknown"""


def ranked(contenders: Sequence[Contender]) -> list[Contender]:
    """Best first. Those that miss a limit come last, in order of what they spend.

    Of those that are as good as the best, the one that spends least comes first; then the others by
    error, and last those whose error is unknown, by their prior.
    """
    fit = [one for one in contenders if one.feasible]
    known = [one for one in fit if one.error is not None]
    least = min((_error(one) for one in known), default=math.inf)
    good = [one for one in known if _error(one) <= least * (1 + AS_GOOD)]
    return [
        *sorted(good, key=lambda one: (one.spend, _error(one), one.name)),
        *sorted(
            (one for one in known if _error(one) > least * (1 + AS_GOOD)),
            key=lambda one: (_error(one), one.spend, one.name),
        ),
        *sorted((one for one in fit if one.error is None), key=lambda one: (one.prior, one.name)),
        *sorted(
            (one for one in contenders if not one.feasible), key=lambda one: (one.spend, one.name)
        ),
    ]


def _error(one: Contender) -> float:
    return math.inf if one.error is None else one.error
