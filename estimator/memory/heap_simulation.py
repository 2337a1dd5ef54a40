"""Simulates a step on a model of the heap: what its blocks and small objects keep resident.

Small objects surround a tensor's block: the tensor itself; a node of autograd's graph and its saved
values, until the backward pass; objects that live little longer than the operation; and, in the
first step, objects that stay. They are in the ends of blocks and in holes, and prevent these from
merging. Which objects there are differs between processes, as addresses do, so they are random.
Their numbers and sizes come from requests to malloc in training steps of networks that calibration
trains, and of an LSTM, a ResNet and a Swin transformer. Loads no torch.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainwright.estimator.lifetimes import Lifetimes
from trainwright.estimator.memory.freed_memory import MOST_HEAP_BLOCK_BYTES
from trainwright.estimator.memory.heap import Chunk, Heap, chunk_bytes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_STEPS = 2  # steps after the first; later ones add little
_LEAST_BYTES, MOST_BLOCKS = 256.0, 2000
"""Blocks that are simulated: none below _LEAST_BYTES, and at most the MOST_BLOCKS largest ones of
the start and a step. The others are added with their size."""


def _chunks(*sizes: int) -> tuple[int, ...]:
    return tuple(map(chunk_bytes, sizes))


_OF_TENSOR = _chunks(176, 96, 24)
_OF_NODE, _NODE_SHARE = _chunks(16, 24, 24, 32, 8, 312, 16, 32), 0.8
_PASSING, _PASSING_COUNT = _chunks(16, 24, 32, 48, 64, 96, 128, 200), 3
_OUTLASTING_SHARE, _OUTLASTED_BLOCKS = 0.4, 3.0
_LASTING = _chunks(200, 400, 1000, 2000, 3000)

_HeapEvent = tuple[int, int, float, int]
"""Index among the codes of lifetimes; number of the storage; bytes; 1: made, -1: freed, 0: both."""


def high_water_bytes(
    lifetimes: Lifetimes,
    batch_size: int,
    workspaces: Sequence[float],
    seeds: Sequence[int],
    lasting_bytes: float = 0.0,
) -> list[float]:
    """By seed: the most resident bytes in the first steps, above those before the model was built.

    `workspaces` are those of the trace's operations in bytes. A seed determines the differences
    between processes. `lasting_bytes` is the size of the small objects that the first step makes
    and that stay.
    """
    import numpy as np

    bytes_of = np.array(
        [*(max(0.0, line(batch_size)) for line in lifetimes.sizes), *workspaces, 0.0]
    )
    numbers, codes, signs = lifetimes.events()
    successors = lifetimes.successors()
    sizes, first = bytes_of[codes], len(lifetimes.start)
    simulated = _largest(numbers, sizes, signs, successors)
    besides = float(np.cumsum(np.where(simulated, 0.0, sizes * signs)).max(initial=0.0))
    shown = np.flatnonzero(simulated)
    events = list(
        zip(
            shown.tolist(),
            numbers[shown].tolist(),
            sizes[shown].tolist(),
            signs[shown].tolist(),
            strict=True,
        )
    )
    split = int(np.searchsorted(shown, first))
    found, each = int((signs[:first] > 0).sum()), int((signs[first:] > 0).sum())
    steps = [_moved(events[split:], successors, found, each, step) for step in range(_STEPS)]
    graphs = lifetimes.graphs or ()
    in_start, in_step = (
        [
            (place, phase)
            for graph in graphs
            if (graph[0] < first) == started
            for phase, place in enumerate(graph)
        ]
        for started in (True, False)
    )
    lasting = (
        lasting_bytes
        / (sum(_LASTING) / len(_LASTING))
        / max(1, sum(event[3] >= 0 for event in events[:split]))
    )
    found_bytes = []
    for seed in seeds:
        process = _Process(random.Random(seed), lasting)
        process.run(events[:split], in_start)
        process.lasting = 0.0
        for step in steps:
            process.run(step, in_step)
        found_bytes.append(process.heap.high_bytes + besides)
    return found_bytes


def _largest(
    numbers: NDArray[Any], sizes: NDArray[Any], signs: NDArray[Any], successors: dict[int, int]
) -> NDArray[np.bool_]:
    """Whether each event belongs to a simulated block.

    If a block is simulated, so is its successor.
    """
    import numpy as np

    made = np.flatnonzero((signs >= 0) & (sizes >= _LEAST_BYTES))
    made = made[np.argsort(-sizes[made], kind="stable")[:MOST_BLOCKS]]
    chosen = {number for number in numbers[made].tolist() if number >= 0}
    for pair in successors.items():
        if not chosen.isdisjoint(pair):
            chosen.update(pair)
    simulated = np.isin(numbers, np.fromiter(chosen, np.int64, len(chosen)))
    simulated[made] = True
    return simulated


def _moved(
    events: list[_HeapEvent], successors: dict[int, int], found: int, each: int, step: int
) -> list[_HeapEvent]:
    """A step's events with the numbers of its own storages.

    `found` is the number of storages from before all steps, `each` the number that each step makes.
    """
    own = step * each
    before = {one: two + own - each for one, two in successors.items()} if step else {}
    return [
        (place, before.get(number, number) if number < found else number + own, size, sign)
        for place, number, size, sign in events
    ]


class _Process:
    """A heap with the blocks of a step and the small objects around them.

    Each block comes with `lasting` small objects that stay.
    """

    def __init__(self, draw: random.Random, lasting: float) -> None:
        self.heap = Heap()
        self.lasting, self._due = lasting, 0.0
        self._random, self._expovariate = draw.random, draw.expovariate
        self._blocks: dict[int, list[Chunk]] = {}  # each block, and its tensor
        self._graph: list[Chunk] = []
        self._passing: list[tuple[float, Chunk]] = []
        self._made = 0
        self._forward = False

    def make(self, number: int, size: float) -> None:
        """Allocate a block; the number -1 means a workspace."""
        random, take, free = self._random, self.heap.take, self.heap.free
        self._due += self.lasting
        while self._due >= 1:
            take(_LASTING[int(random() * len(_LASTING))])
            self._due -= 1
        if size > MOST_HEAP_BLOCK_BYTES:  # a mapping
            self._blocks[number] = [self.heap.memalign(size)]
            return
        self._made += 1
        while self._passing and self._passing[0][0] <= self._made:
            free(heapq.heappop(self._passing)[1])
        passing = [take(_PASSING[int(random() * len(_PASSING))]) for _ in range(_PASSING_COUNT)]
        tensor = [take(one) for one in _OF_TENSOR]
        self._blocks[number] = [self.heap.memalign(size), *tensor]
        if self._forward:
            self._graph += [take(one) for one in _OF_NODE if random() < _NODE_SHARE]
        for one in passing:
            if random() < _OUTLASTING_SHARE:
                heapq.heappush(
                    self._passing, (self._made + self._expovariate(1 / _OUTLASTED_BLOCKS), one)
                )
            else:
                free(one)

    def end(self, number: int) -> None:
        """Free a block and its tensor, if they exist.

        (Storages from before the steps are freed only once.)
        """
        for one in self._blocks.pop(number, ()):
            self.heap.free(one)

    def run(self, events: Sequence[_HeapEvent], phases: Sequence[tuple[int, int]]) -> None:
        """Run events and autograd's phases in order.

        A phase is (index, 0: the graph begins, 1: the backward pass begins, 2: it has ended).
        """
        at = 0
        for place, number, size, sign in events:
            while at < len(phases) and phases[at][0] <= place:
                self._phase(phases[at][1])
                at += 1
            if sign > 0:
                self.make(number, size)
            elif sign < 0:
                self.end(number)
            else:
                self.make(number, size)
                self.end(number)
        for _, phase in phases[at:]:
            self._phase(phase)

    def _phase(self, number: int) -> None:
        self._forward = number == 0
        if number == 2:
            for one in self._graph:
                self.heap.free(one)
            self._graph = []
