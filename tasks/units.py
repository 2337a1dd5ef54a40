"""Formats quantities with their units."""

from __future__ import annotations

from collections.abc import Callable, Mapping


def seconds(value: float | None) -> str:
    """0.0123 -> 12.3 ms, 75 -> 1 min 15 s."""
    if value is None:
        return "-"
    if value < 1e-3:
        return f"{value * 1e6:.0f} us"
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def amount(value: float | None, unit: str = "") -> str:
    """123456789 FLOP -> 123 MFLOP."""
    if value is None:
        return "-"
    for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.3g} {prefix}{unit}".rstrip()
    return f"{value:.3g} {unit}".rstrip()


def size(value: float | None) -> str:
    """Bytes, in powers of 1024."""
    if value is None:
        return "-"
    for scale, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.0f} B"


def interval(value: Mapping[str, float] | None, show: Callable[[float], str]) -> str:
    """median (low to high)."""
    if value is None:
        return "-"
    return f"{show(value['median'])}  ({show(value['low'])} to {show(value['high'])})"
