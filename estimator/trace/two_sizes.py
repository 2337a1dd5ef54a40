"""Operations and storages as lines over the batch size, from traces at a size and its double.

Loads torch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from typing import Any

from trainwright.estimator.curves import Affine
from trainwright.estimator.lifetimes import KeptStorage, Lifetimes, ModuleCall
from trainwright.estimator.structure import REQUIRED_DIMS, Operation
from trainwright.estimator.trace.operations import OperationCall
from trainwright.estimator.trace.recorder import Lives
from trainwright.estimator.trace.storage_uses import StorageUses


def line(low: float, high: float, size: int) -> Affine:
    """The line through the values at `size` and `2 · size`."""
    per_sample = max(0.0, (high - low) / size)
    return Affine(fixed=max(0.0, low - per_sample * size), per_sample=per_sample)


def _through_origin(value: float, size: int) -> Affine:
    return Affine(fixed=0.0, per_sample=value / size)


def at_any_size(
    first: list[OperationCall], second: list[OperationCall], size: int, idle: Affine
) -> tuple[list[Operation], list[int]]:
    """The operations of a step, grouped by similarity, and the group of each operation that ran."""
    alike = [one.kind for one in first] == [one.kind for one in second]
    # Persistent memory at any batch size: parameters, moments.
    held = min([idle.fixed, *(one.live_bytes for one in first)])
    most: dict[Any, float] = {}
    counts: Counter[Any] = Counter()
    lives: dict[Any, Affine] = {}
    ran: list[Any] = []
    for one, two in zip(first, second if alike else first, strict=True):
        if alike:
            lines = [line(one.flops, two.flops, size), line(one.bytes, two.bytes, size)]
            dims = tuple(
                (name, line(value, two.dims.get(name, value), size))
                for name, value in one.dims.items()
            )
            live = line(one.live_bytes, two.live_bytes, size)
        else:
            # Control flow depends on the batch size: scale the first step, except persistent
            # memory.
            lines = [_through_origin(one.flops, size), _through_origin(one.bytes, size)]
            dims = tuple(
                (name, Affine(fixed=value, per_sample=0.0)) for name, value in one.dims.items()
            )
            live = Affine(fixed=held, per_sample=(one.live_bytes - held) / size)
        key = (one.kind, one.family, one.dtype, lines[0], lines[1], dims, tuple(one.layout.items()))
        counts[key] += 1
        ran.append(key)
        if key not in lives or live(size) > most[key]:
            lives[key], most[key] = live, live(size)
    together = [
        Operation(
            kind=kind,
            family=family,
            dtype=dtype,
            count=count,
            flops=flops,
            bytes=moved,
            dims=dict(dims),
            layout=dict(layout),
            live_bytes=lives[(kind, family, dtype, flops, moved, dims, layout)],
        )
        for (kind, family, dtype, flops, moved, dims, layout), count in counts.items()
    ]
    places = {key: place for place, key in enumerate(counts)}
    return together, [places[key] for key in ran]


def lifetimes(
    first: Lives, second: Lives, size: int, trace: list[Operation], ran: list[int]
) -> Lifetimes | None:
    """The lifetimes of storages, as lines over the batch size; None if their order differs."""
    if [one.number for one in first.events] != [one.number for one in second.events]:
        return None
    sizes: dict[tuple[float, float], int] = {}
    lines: list[Affine] = []
    codes: list[int] = []
    ops: dict[int, int] = {}  # index of a workspace -> its operation's index in the trace
    for one, two in zip(first.events, second.events, strict=True):
        if one.number < 0:
            place = ran[-1 - one.number]
            if trace[place].family in REQUIRED_DIMS:
                ops[len(codes)] = place
            codes.append(0)
        elif one.bytes is None or two.bytes is None:
            codes.append(-1 - one.number)
        else:
            known = (one.bytes, two.bytes)
            if known not in sizes:
                sizes[known] = len(lines)
                lines.append(line(*known, size))
            codes.append(sizes[known])
    step = range(first.recorded, len(codes))
    shown = [place for place in step if first.events[place].number >= 0 or place in ops]
    shown_places = [*range(first.recorded), *shown]

    def at(place: int) -> int:
        return bisect_left(shown_places, place)

    return Lifetimes(
        sizes=tuple(lines),
        start=tuple(codes[: first.recorded]),
        step=tuple(len(lines) + ops[place] if place in ops else codes[place] for place in shown),
        graphs=tuple((at(one), at(two), at(three)) for one, two, three in first.graphs),
        **_uses(first, at),
    )


def _uses(lives: Lives, at: Callable[[int], int]) -> dict[str, Any]:
    """The calls of modules and what is kept for them, with places by `at`.

    Calls that save nothing, and those that can't be done again, are left out.
    """
    uses, begun = lives.uses, (one.number for one in lives.events[: lives.recorded])
    found = 1 + max(begun, default=-1)
    made = {
        one.number: place
        for place, one in enumerate(lives.events)
        if one.number >= found and one.bytes is not None
    }
    index = {-1: -1}
    calls = list[ModuleCall]()
    stops = _stops(uses, made)
    for old, call in enumerate(uses.calls):
        index[old] = index[call.parent]
        if call.backward < 0 or call.end < 0 or call.overwritten:
            continue
        index[old] = len(calls)
        calls.append(
            ModuleCall(
                name=call.name,
                parent=index[call.parent],
                begin=at(call.begin),
                end=at(call.end),
                stop=at(min(call.end, stops[old])),
                backward=at(call.backward),
                done=at(call.done),
                given=tuple(sorted(call.given)),
            )
        )
    kept = [
        KeptStorage(
            number,
            at(uses.read_last.get(number, made[number])),
            tuple((index[call], at(place)) for call, place in by_call.items()),
        )
        for number, by_call in sorted(uses.saves.items())
        if number in made
    ]
    return {"calls": tuple(calls), "kept": tuple(kept)}


def _stops(uses: StorageUses, made: dict[int, int]) -> list[int]:
    """By call: the place where its last saved storage exists."""
    stops = [call.stop for call in uses.calls]
    for number, by_call in uses.saves.items():
        for call in by_call:
            while call >= 0:
                seen = uses.calls[call]
                if seen.begin <= made.get(number, -1) < seen.end:
                    stops[call] = max(stops[call], made[number] + 1)
                call = seen.parent
    return stops
