"""Resident memory of a training process, by playing the step's allocations on a model of glibc's heap. Loads no torch.

Blocks of tensors are what was recorded (`estimator.recorder`), those of oneDNN what `estimator.workspace` says. What decides how
the heap is cut up are the small blocks between them: an aligned request leaves some 100 bytes, which objects of torch and Python
take, so that the freed block no longer fits the next request of its own size. Their sizes and lives here are those of PyTorch
2.x: StorageImpl, TensorImpl, AutogradMeta, a node of the graph with its edges, and lists of sizes.

Where the first small blocks lie differs between processes (addresses are random), and with it the outcome, by 10 % and more: some
starts are drawn, the same each time.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from trainwright.estimator.curves import Knots
from trainwright.estimator.heap import Heap
from trainwright.estimator.workspace import convolution_blocks, workspace_bytes

_THRESHOLD = 2 * 2**20  # where loading torch leaves the mmap threshold, about
_STEPS = 3
_STARTS, _STARTS_BEYOND = 3, 1
_MOST_EVENTS = 60_000  # of a batch size; with more, fewer starts are drawn
_FACTORS = (1 / 8, 1 / 2, 1, 2, 8)

_SIZES, _NUMBER = 24, 8  # a short list of sizes, or version counter; a list's end
_STORAGE, _TENSOR, _META = 96, 176, 184
_NODE, _VIEW_NODE, _EDGES, _SAVED = 544, 480, 16, 40
_BACKWARD = (24, 48, 24, 104, 64, 512)  # of a call of the backward pass, while it runs
_EARLIER = (24, 24, 40, 56, 72, 88, 104, 120, 136, 176, 184, 200, 250, 300, 350, 400, 472, 500, 520, 600, 700, 800, 900, 1000,
            1500, 3000)  # fmt: skip
_EARLIER_COUNT, _EARLIER_FREED = 1000, 30


@dataclass(frozen=True, slots=True)
class Made:
    """A storage was made; its `number` is its own."""

    number: int
    bytes: float


@dataclass(frozen=True, slots=True)
class Ended:
    """A storage ended."""

    number: int


@dataclass(frozen=True, slots=True)
class Ran:
    """An operation has run; its results were made just before."""

    family: str
    kind: str = ""
    dtype: str = ""
    forward: bool = True
    dims: dict[str, float] = field(default_factory=dict)


Event = Made | Ended | Ran


@dataclass(frozen=True, slots=True)
class Lives:
    """What happened to storages while a model was built, in its first step, and in each step since."""

    built: Sequence[Event]
    first: Sequence[Event]
    later: Sequence[Event]


def resident_curves(low: Lives, high: Lives, size: int) -> tuple[Knots, Knots]:
    """Resident bytes over the batch size, and the most of all starts, from the lives at `size` and at twice that."""
    middles, tops = [], []
    sizes = sorted({max(1, int(size * one)) for one in _FACTORS})
    for at in sizes:
        lives = _at(low, high, at / size)
        events = len(lives.first) + (_STEPS - 1) * len(lives.later)
        starts = max(1, min(_STARTS if at == size else _STARTS_BEYOND, _MOST_EVENTS // max(events, 1)))
        seen = [resident_bytes(lives, start) for start in range(starts)]
        middles.append(float(statistics.median(seen)))
        tops.append(float(max(seen)))
    return Knots(sizes=tuple(sizes), values=tuple(middles)), Knots(sizes=tuple(sizes), values=tuple(tops))


def resident_bytes(lives: Lives, start: int) -> int:
    """The most that was resident in some steps, above what was before the model was built."""
    heap, draw = Heap(_THRESHOLD), random.Random(start)
    earlier = [heap.allocate(draw.choice(_EARLIER)) for _ in range(_EARLIER_COUNT)]
    for _ in range(_EARLIER_FREED):
        heap.free(earlier.pop(draw.randrange(len(earlier))))
    before = heap.resident_bytes
    play = _Play(heap, draw)
    play.build(lives.built)
    play.step(lives.first)
    same = _same_places(lives)
    for _ in range(_STEPS - 1):
        play.step(lives.later, same)
    return heap.high_bytes - before


class _Play:
    """Plays events on a heap."""

    def __init__(self, heap: Heap, draw: random.Random) -> None:
        self._heap, self._draw = heap, draw
        self._storages: dict[int, list[list[int]]] = {}
        self._nodes: list[list[int]] = []

    def build(self, events: Sequence[Event]) -> None:
        """What stays: parameters, buffers, the batch."""
        for one in events:
            if isinstance(one, Made):
                self._make(one, one.number, grad=True)
            elif isinstance(one, Ended):
                self._end(one.number)

    def step(self, events: Sequence[Event], same: dict[int, int] | None = None) -> None:
        """One training step. `same` names the storages that take others' places when the step is done again."""
        made: list[Made] = []
        same = same or {}
        for one in events:
            if isinstance(one, Made):
                made.append(one)
            elif isinstance(one, Ended):
                self._end(same.get(one.number, one.number))
            else:
                self._run(one, made, same)
                made = []
        for left in made:
            self._make(left, same.get(left.number, left.number), grad=False)
        while self._nodes:
            self._free(self._nodes.pop())

    def _run(self, one: Ran, made: list[Made], same: dict[int, int]) -> None:
        small, aligned = self._heap.allocate, self._heap.allocate_aligned
        passing = [small(_SIZES), small(_NUMBER)]
        view = one.family == "view"
        if one.forward:
            node = (_VIEW_NODE, _EDGES, _TENSOR, *3 * (_SIZES,)) if view else (_NODE, _EDGES, _SAVED, *3 * (_SIZES,))
            self._nodes.append([small(size) for size in node])
        else:
            passing += [small(size) for size in ((_TENSOR, _SIZES) if view else _BACKWARD)]
        number = [] if view else [small(_STORAGE), aligned(_NUMBER), small(_TENSOR), small(_SIZES)]
        waiting = list(made)
        for during, kept in _blocks(one):
            used, result = [aligned(int(size)) for size in during], [aligned(int(size)) for size in kept]
            self._free(used)
            if waiting:
                first = waiting.pop(0)
                self._make(first, same.get(first.number, first.number), grad=one.forward)
            self._free(result)
        for left in waiting:
            self._make(left, same.get(left.number, left.number), grad=one.forward)
        self._free(number)
        if not one.forward and self._nodes and self._draw.random() < 0.5:  # some two calls for each node
            self._free(self._nodes.pop())
        self._free(passing)

    def _make(self, one: Made, number: int, *, grad: bool) -> None:
        small = self._heap.allocate
        storage = small(_STORAGE)
        data = self._heap.allocate_aligned(int(one.bytes)) if one.bytes else small(_NUMBER)
        blocks = [data, storage, small(_TENSOR), small(_SIZES), *([small(_META)] if grad else ())]
        self._storages.setdefault(number, []).append(blocks)

    def _end(self, number: int) -> None:
        held = self._storages.get(number)
        if held:
            self._free(held.pop(0))

    def _free(self, blocks: Sequence[int]) -> None:
        for one in blocks:
            self._heap.free(one)


def _blocks(one: Ran) -> list[tuple[list[float], list[float]]]:
    """Of each result: blocks that end before it is made, and blocks that end after."""
    needed = workspace_bytes(one.family, one.kind, one.dtype, one.dims) if one.dims else 0.0
    if needed < 1:
        return []
    return convolution_blocks(one.family, one.dtype, one.dims) or [([], [needed])]


def _same_places(lives: Lives) -> dict[int, int]:
    """Storages that a step makes and leaves, named as those of their size that it found and ended (gradients, the loss)."""
    sizes = {one.number: one.bytes for part in (lives.built, lives.first) for one in part if isinstance(one, Made)}
    made = {one.number: one.bytes for one in lives.later if isinstance(one, Made)}
    ended = dict.fromkeys(one.number for one in lives.later if isinstance(one, Ended))
    found: dict[float, list[int]] = {}
    for number in ended:
        if number in sizes:
            found.setdefault(sizes[number], []).append(number)
    left = [number for number in made if number not in ended]
    return {number: found[made[number]].pop(0) for number in left if found.get(made[number])}


def _at(low: Lives, high: Lives, times: float) -> Lives:
    """The lives at `times` the lower batch size, sizes along the lines through both."""
    return Lives(
        _between(low.built, high.built, times),
        _between(low.first, high.first, times),
        _between(low.later, high.later, times),
    )


def _between(low: Sequence[Event], high: Sequence[Event], times: float) -> list[Event]:
    if times == 1 or [type(one) for one in low] != [type(one) for one in high]:
        return list(low)
    return [_line(one, two, times) for one, two in zip(low, high, strict=True)]


def _line(one: Event, two: Event, times: float) -> Event:
    if isinstance(one, Made) and isinstance(two, Made):
        return Made(one.number, _value(one.bytes, two.bytes, times))
    if isinstance(one, Ran) and isinstance(two, Ran) and one.dims:
        dims = {name: _value(value, two.dims.get(name, value), times) for name, value in one.dims.items()}
        return Ran(one.family, one.kind, one.dtype, one.forward, dims)
    return one


def _value(low: float, high: float, times: float) -> float:
    """At `times` the lower size. A size below 0 is no size: control flow by batch size."""
    return max(0.0, low + (high - low) * (times - 1))
