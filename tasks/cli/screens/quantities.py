"""Columns of one quantity, in one unit, which the header states."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from trainwright.tasks.units import amount, is_rough, plain, predicted, seconds

Units = Sequence[tuple[float, str]]
"""Scales with their units, largest first."""
TIMES = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
ENERGIES = ((1e9, "GJ"), (1e6, "MJ"), (1e3, "kJ"), (1.0, "J"), (1e-3, "mJ"))
SIZES = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))


_MOST_DECIMALS = 9


def money(currency: str | None) -> Units:
    """A pool's currency; if the pool does not name one, its prices have no unit."""
    return ((1.0, currency or "units"),)


def unit_of(values: Iterable[float | None], units: Units) -> tuple[float, str]:
    """The unit in which the median of the known values is at least one."""
    known = sorted(
        abs(value) for value in values if value is not None and 0 < abs(value) < math.inf
    )
    if not known:
        return units[-1]
    return next((one for one in units if known[len(known) // 2] >= one[0]), units[-1])


def column(
    values: Iterable[float | None], units: Units, of: float | None = None
) -> tuple[str, list[str]]:
    """A unit for these values, and all of them in it, with the same number of decimals.

    `of`: the value that determines both; without it the median does. It has three significant
    digits, the least value one, unless that takes more than nine decimals.
    """
    given = list(values)
    known = sorted(abs(one) for one in given if one is not None and 0 < abs(one) < math.inf)
    scale, unit = unit_of([of] if of else known, units)
    if not known:
        return unit, ["-" if value is None else f"{value:g}" for value in given]
    middle = abs(of) if of else known[len(known) // 2]
    decimals = min(
        _MOST_DECIMALS, max(_decimals(middle / scale, 3), _decimals(known[0] / scale, 1))
    )
    return unit, ["-" if value is None else f"{value / scale:.{decimals}f}" for value in given]


def median_cell(ends: Mapping[str, float], units: Units, text: str) -> str:
    """The cell of a predicted median, which has this text if its interval is not rough."""
    if not is_rough(ends["low"], ends["high"]):
        return text
    if units is TIMES:
        return predicted(ends, seconds)
    if units is ENERGIES:
        return predicted(ends, lambda value: amount(value, "J"))
    return predicted(ends, lambda value: f"{plain(value)} {units[0][1]}")


def _decimals(value: float, digits: int) -> int:
    """The decimals with which a positive value has this many significant digits."""
    return max(0, digits - 1 - math.floor(math.log10(value)))


def headed(name: str, values: Iterable[float | None], units: Units) -> tuple[str, list[str]]:
    """A column with its header."""
    unit, texts = column(values, units)
    return f"{name}\n{unit}", texts
