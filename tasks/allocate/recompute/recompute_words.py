"""A plan with recomputation in words."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence

from trainwright.estimator.memory.recompute_names import ends_of
from trainwright.tasks.allocate.layouts.words import ALL_SUMMED
from trainwright.tasks.allocate.plan.configuration import Configuration
from trainwright.tasks.allocate.recompute.recomputing_curves import RecomputingCurves
from trainwright.tasks.units import plain

_MOST_NAMED = 4
_NUMBERED = re.compile(r"^(.*?)(\d+)(\..*)?$")


def recompute_words(
    result: Configuration, by_device: Mapping[str, Sequence[str]], curves: RecomputingCurves
) -> str:
    """What each kind of device recomputes, and how memory and time change by it.

    Memory is that of a step's tensors at once, time that of the device's step.
    """
    model, estimate = result.topology.model, result.topology.model.estimate
    count = len(by_device)
    found: dict[str, list[str]] = {}
    for device, batch in result.devices():
        names = by_device[device.id]
        if not names:
            continue
        samples = math.ceil(batch / result.accumulation)
        curve = estimate.curve(device)
        share = curves.share(curve, names, samples)
        pieces = min(batch, result.accumulation)
        took = model.kind(device).curve.median_s(batch, result.accumulation)
        longer = pieces * share.seconds / max(took - pieces * share.seconds, 1e-30)
        less = share.saved_bytes / share.plain_bytes if share.plain_bytes else 0.0
        words = recompute_in_words(names, less, longer)
        found.setdefault(words, []).append(device.id)
    where = f"on {count} devices" if count > 1 else "on one device"
    parts = [
        words if len(devices) == count else f"{', '.join(devices)}: {words}"
        for words, devices in found.items()
    ]
    return "; ".join([f"{ALL_SUMMED} {where}", *parts])


def recompute_in_words(names: Sequence[str], less: float, longer: float) -> str:
    """What is recomputed, and the shares of memory that it saves and of time that it adds."""
    memory = f"{_change(-less)} memory" if less > 0 else f"saves no memory ({_change(-less)})"
    return f"recompute {names_in_words(names)}: {memory}, {_change(longer)} time"


def names_in_words(names: Sequence[str]) -> str:
    """Names of modules; those that differ in a number, as ranges: blocks.3–9.

    Modules that are recomputed together are a range of their own.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    order: list[tuple[str, str]] = []
    for name in names:
        first, last = ends_of(name)
        if first != last:
            order.append((_span(first, last), ""))
            groups[order[-1]] = []
            continue
        match = _NUMBERED.match(name)
        key = (match[1], match[3] or "") if match else (name, "")
        if key not in groups:
            order.append(key)
        groups.setdefault(key, []).extend([int(match[2])] if match else [])
    words = [f"{before}{ranges_in_words(groups[before, after])}{after}" for before, after in order]
    more = len(words) - _MOST_NAMED
    return ", ".join(words[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _span(first: str, last: str) -> str:
    """Modules from one to another."""
    one, other = _NUMBERED.match(first), _NUMBERED.match(last)
    if one and other and (one[1], one[3]) == (other[1], other[3]):
        return f"{one[1]}{one[2]}–{other[2]}{one[3] or ''}"
    return f"{first}–{last}"


def ranges_in_words(numbers: Sequence[int]) -> str:
    """Numbers in rising order, neighbours as ranges."""
    found = []
    for _, run in itertools.groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0]):
        some = [number for _, number in run]
        found.append(f"{some[0]}–{some[-1]}" if len(some) > 1 else str(some[0]))
    return ",".join(found)


def _change(share: float) -> str:
    return f"{'−' if share < 0 else '+'}{plain(100 * abs(share), 2)} %"
