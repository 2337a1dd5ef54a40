"""What of a recorded step is worth recomputing: modules, and runs of them. Loads no torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

from trainwright.estimator.lifetimes import Lifetimes, ModuleCall
from trainwright.estimator.memory.recomputation import StepSimulation
from trainwright.estimator.memory.recompute_names import is_inside, run_of

_LONGEST = 2.0
"""A run of n modules that follow each other has at most this times √n of them."""


def worthwhile(step: StepSimulation, least_share: float) -> list[str]:
    """The modules that alone keep more than this share of all kept bytes.

    Beyond what they would keep of their arguments; in the order in which they run, without the
    model itself.
    """
    calls = step.lifetimes.calls
    gains, total = [0.0] * len(calls), 0.0
    for kept in step.lifetimes.kept:
        size = step.bytes_of(kept.number)
        total += size
        inside = _around(step.lifetimes, _maker(step.lifetimes, step.lifetime(kept.number)[0]))
        for saver, _ in kept.saves:
            inside &= _around(step.lifetimes, saver)
        for place in inside:
            gains[place] += size
    kept_anyway = {one.number for one in step.lifetimes.kept}
    by_name: dict[str, float] = {}
    for call, gain in zip(calls, gains, strict=True):
        added = sum(
            step.bytes_of(one)
            for one in call.given
            if one not in kept_anyway and step.lifetime(one)[1] < call.done
        )
        by_name[call.name] = by_name.get(call.name, 0.0) + gain - added
    outer = [call.name for call in calls if call.parent < 0]
    model = outer if len(outer) == 1 else []
    return [
        name for name, gain in by_name.items() if name not in model and gain > least_share * total
    ]


def runs(step: StepSimulation, modules: Collection[str], most: int) -> list[str]:
    """Runs of modules that can be recomputed together, at most so many, by their names.

    They follow each other in the code of one module; runs of outer modules come first. `modules`
    are those that are called when a pass is made call by call (`Unit.modules`).
    """
    found: dict[str, None] = {}
    for groups in _siblings(step.lifetimes.calls):
        stride, own = 1, list[str]()
        while stride == 1 or (own and len(found) + len(own) > most):
            own = [name for names in groups for name in _runs(names, modules, stride)]
            stride += 1
        found |= dict.fromkeys(own)
    return list(found)


def _siblings(calls: Sequence[ModuleCall]) -> list[list[list[str]]]:
    """By depth: the modules that follow each other in the code of one, for each such module."""
    depths: list[int] = []
    levels: list[dict[int, list[str]]] = []
    for call in calls:
        depths.append(depths[call.parent] + 1 if call.parent >= 0 else 0)
        levels += [{}] if depths[-1] == len(levels) else []
        levels[depths[-1]].setdefault(call.parent, []).append(call.name)
    return [list({tuple(own): own for own in level.values()}.values()) for level in levels]


def _runs(names: Sequence[str], modules: Collection[str], stride: int) -> Iterator[str]:
    """Runs of these modules, but all of them; those that begin at each `stride`-th one."""
    count = len(names)
    longest = min(count - 1, math.ceil(_LONGEST * math.sqrt(count)))
    ends = [
        names.count(one) == 1 and any(is_inside(each, one) for each in modules) for one in names
    ]
    if stride > count:
        return
    for begin in range(0, count - 1, stride):
        for end in range(begin + 1, min(count, begin + longest)):
            if ends[begin] and ends[end]:
                yield run_of(names[begin], names[end])


def exclusive(step: StepSimulation, names: Sequence[str]) -> list[list[int]]:
    """Sets of these candidates, by index, of which only one may be chosen: they share a call."""
    around: dict[int, list[int]] = {}
    for index, name in enumerate(names):
        for _, members in step.regions(name):
            for call in members:
                around.setdefault(call, []).append(index)
    found = {tuple(dict.fromkeys(own)) for own in around.values()}
    return [list(own) for own in sorted(found) if len(own) > 1]


def _maker(lifetimes: Lifetimes, birth: int) -> int:
    """The innermost call that makes a storage; -1: none."""
    found = -1
    for place, call in enumerate(lifetimes.calls):
        if call.begin > birth:
            break
        if birth < call.end:
            found = place
    return found


def _around(lifetimes: Lifetimes, place: int) -> set[int]:
    """A call and those around it."""
    found = set[int]()
    while place >= 0:
        found.add(place)
        place = lifetimes.calls[place].parent
    return found
