"""Which season a set of series has, and how much history a forecast of them gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainwright.tasks.errors import BadInput

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

SEASONS = (2, 7)
"""The least and the greatest number of seasons in an automatic history."""
LONGEST_HISTORY = 512
"""An automatic history of more than two seasons has at most this many steps."""

_LEAST, _NEAR_BEST = 0.3, 0.9
_SERIES, _STEPS = 100, 100_000


def season_of(series: Sequence[Array], candidates: Sequence[int]) -> int | None:
    """The number of steps after which the series repeat themselves; None if they do not.

    The autocorrelation of the differences between successive values is computed at each candidate,
    over the last 100,000 steps of the first 100 series. Of the candidates that reach 0.9 of the
    largest one, the shortest is the season. None if the largest is below 0.3.
    """
    found = {
        candidate: _autocorrelation(series[:_SERIES], candidate)
        for candidate in candidates
        if any(len(values) > 2 * candidate for values in series[:_SERIES])
    }
    best = max(found.values(), default=0.0)
    if best < _LEAST:
        return None
    return min(candidate for candidate, value in found.items() if value >= _NEAR_BEST * best)


def _autocorrelation(series: Sequence[Array], lag: int) -> float:
    """Of the differences of successive values, over all series that are longer than two lags."""
    import numpy as np

    common = whole = 0.0
    for values in series:
        if len(values) <= 2 * lag:
            continue
        steps = np.diff(values[-_STEPS:].astype(np.float64))
        steps -= steps.mean()
        power = float(steps @ steps) / len(steps)
        if power > 0:  # each series counts by its length, not by its scale
            common += float(steps[lag:] @ steps[:-lag]) / power
            whole += len(steps) - lag
    return common / whole if whole else 0.0


def chosen_horizon(given: int | None, season: int | None) -> int:
    """The number of steps to forecast: the job's, or one season. Raises BadInput without both."""
    if given is not None:
        return given
    if season is None:
        raise BadInput(
            "data.horizon: not given, and the series have no season that it could be; "
            "allowed: a number of steps to forecast"
        )
    return season


def chosen_history(given: int | None, horizon: int, season: int | None, shortest: int) -> int:
    """The number of past steps that a forecast gets.

    The job's; else as many seasons, from 2 to 7, as fit into 512 steps and, with the horizon, into
    half of the shortest series' training part (`shortest` steps). Without a season, the horizon
    takes its place. Raises BadInput if the job's history is below two seasons.
    """
    if given is not None:
        if season is not None and given < SEASONS[0] * season:
            raise BadInput(
                f"data.history: got {given}; the series repeat themselves every {season} steps; "
                f"allowed: at least two seasons, {SEASONS[0] * season} steps"
            )
        return given
    unit = season or horizon
    room = min(LONGEST_HISTORY, shortest // 2 - horizon)
    least, most = SEASONS
    return unit * min(max(room // unit, least), most)
