"""Formats quantities with their units."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping


def plain(value: float, digits: int = 3) -> str:
    """A number with at least this many significant digits, never with an exponent.

    960.4 -> 960, 12345.6 -> 12,346, 0.00123456 -> 0.00123.
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if decimals else text


def metric(value: float) -> str:
    """A validation metric: 0.98765 -> 0.9877, 23249.7 -> 23,250, 0.0000123 -> 0.0000123."""
    if not math.isfinite(value):
        return f"{value:g}"
    size = abs(value)
    if 0 < size < 1e-4:
        return plain(value)
    return f"{value:,.{4 if size < 10 else max(0, 4 - math.floor(math.log10(size)))}f}"


_ROUGH_FROM = 10.0
_UNKNOWN_FROM = 1e6


def is_rough(low: float, high: float) -> bool:
    """Whether an interval is so wide that only the order of its value is known.

    A bound on one side (low is 0) is no such interval.
    """
    return low > 0 and high / low > _ROUGH_FROM


def is_unknown(low: float, high: float) -> bool:
    """Whether an interval is so wide that not even the order of its value is known."""
    return low > 0 and high / low > _UNKNOWN_FROM


def counted(count: int, noun: str) -> str:
    """1 candidate, 2 candidates."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def seconds(value: float | None) -> str:
    """0.0123 -> 12.3 ms, 75 -> 1 min 15 s, 1800 -> 30 min."""
    if value is None:
        return "-"
    if value == 0:
        return "0 s"
    if value < 1e-3:
        return f"{value * 1e6:.0f} us"
    if value < 1:
        return f"{plain(value * 1e3)} ms"
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    return f"{minutes} min {rest} s" if rest else f"{minutes} min"


def coarse(value: float | None) -> str:
    """20.6 -> 20.6 s, 147 -> 2 min, 5400 -> 1.5 h, 200000 -> 2 days: for narrow columns."""
    if value is None or value < 60:
        return seconds(value)
    if value < 3600:
        return f"{value / 60:.0f} min"
    if value < 2 * 86400:
        return f"{plain(value / 3600, 2)} h"
    return counted(int(value // 86400), "day")


def amount(value: float | None, unit: str = "") -> str:
    """123456789 FLOP -> 123 MFLOP."""
    if value is None:
        return "-"
    for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{plain(value / scale)} {prefix}{unit}".rstrip()
    return f"{plain(value)} {unit}".rstrip()


def size(value: float | None) -> str:
    """Bytes, in powers of 1024."""
    if value is None:
        return "-"
    for scale, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= scale:
            return f"{plain(value / scale)} {unit}"
    return f"{value:.0f} B"


def predicted(value: Mapping[str, float], show: Callable[[float], str]) -> str:
    """A predicted value, whose interval stands beside it: 2 min 27 s.

    With a rough interval: about 2 min (rough). All screens, pages and charts say it so.
    """
    median, low, high = value["median"], value["low"], value["high"]
    if is_unknown(low, high):
        return "not known"
    if not is_rough(low, high):
        return show(median)
    near = float(f"{median:.2g}")
    if show is not seconds or median < 1:
        return f"about {show(near)} (rough)"
    return f"about {coarse(median) if median >= 60 else f'{plain(near)} s'} (rough)"


def interval(value: Mapping[str, float] | None, show: Callable[[float], str]) -> str:
    """median (low to high); of a rough interval, only what `predicted` says."""
    if value is None:
        return "-"
    if is_rough(value["low"], value["high"]):
        return predicted(value, show)
    return f"{show(value['median'])}  ({show(value['low'])} to {show(value['high'])})"
