"""Memory that a training step takes: of tensors, and of the process that holds them. Arithmetic on values; loads no torch.

Three figures, each with its meaning:
- expected: the most bytes of torch's CPU allocator alive at once, `Structure.peak_bytes`;
- safe: what the resident memory of the process stays below, above what it held before the model was built;
- the process itself: interpreter, torch, Horovod, readers of data, and the buffer in which gradients are summed. A plan adds it.

Resident memory exceeds live bytes because glibc keeps what is freed: `heap` plays a step's blocks on a model of its malloc. Where
blocks come to lie also hangs on addresses, which differ between processes: the same training holds 10 % more or less. Kernels
that oneDNN compiles, and code that is read for the first time, come on top.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from trainwright.estimator.freed_memory import MOST_HEAP_BLOCK_BYTES
from trainwright.estimator.heap import high_water_bytes
from trainwright.estimator.structure import Lifetimes, Operation, Structure

# Quantile regression of resident memory on the two terms, errors relative, at the 99th percentile, of 197 networks that
# calibration trains (`tests/benchmarks/estimator/safe.py --networks 200 --fit`); the zoo has no part in it.
_BYTES_PER_KIND, _HELD_SHARE = 0.56 * 2**20, 1.21
# Of a structure without lifetimes: the excess over live bytes, by the kinds and by what comes and goes in small blocks.
_UNPLAYED_FIXED_BYTES, _UNPLAYED_BYTES_PER_KIND, _UNPLAYED_HEAP_SHARE = 5.0 * 2**20, 0.081 * 2**20, 1.41
_BEHIND, _PLAYED = 10, 3
"""How many blocks later things are made that live in a block's ends, on average (exponential); how often that is drawn."""
_STEPS = 2  # after the first; later ones add little
_LEAST_BYTES, _MOST_BLOCKS = 1024.0, 1500
"""Blocks that are played: not the smallest, and no more than so many, the largest."""

_PROCESS_BYTES = 420 * 2**20
"""Of a rank before its model: torch, oneDNN, Horovod, TensorBoard, the readers of data (measured)."""


def process_bytes(structure: Structure) -> float:
    """What a rank holds beside its step: the process, and the buffer in which gradients are summed."""
    return _PROCESS_BYTES + float(structure.parameter_bytes)


def safe_bytes(structure: Structure, batch_size: int, expected: float) -> float:
    """Resident bytes that a step stays below, above what the process held before: c0 · kinds of operations + c1 · held.

    `expected` is `Structure.peak_bytes` at that batch size.
    """
    if structure.lifetimes is None:
        kinds, heap = excess_terms(structure, batch_size, expected)
        return expected + _UNPLAYED_FIXED_BYTES + _UNPLAYED_BYTES_PER_KIND * kinds + _UNPLAYED_HEAP_SHARE * heap
    kinds, held = held_terms(structure, structure.lifetimes, batch_size, expected)
    return _BYTES_PER_KIND * kinds + _HELD_SHARE * held


def held_terms(structure: Structure, lifetimes: Lifetimes, batch_size: int, expected: float) -> tuple[float, float]:
    """What resident memory depends on: kinds of operations, each with code of its own, and what the heap's model holds at most.

    The latter is the mean of several plays, and no less than `expected`.
    """
    import numpy as np

    workspaces = [one.workspace_bytes(batch_size) for one in structure.trace]
    numbers, sizes = lifetimes.events(batch_size, workspaces, _STEPS)
    made = np.sort(sizes[sizes > 0])
    least = max(_LEAST_BYTES, float(made[-_MOST_BLOCKS])) if len(made) > _MOST_BLOCKS else _LEAST_BYTES
    played = [high_water_bytes(numbers, sizes, least, _behind(number)) for number in range(_PLAYED)]
    kinds = {one.kind for one in structure.trace if one.family != "view"}
    return float(len(kinds)), max(expected, sum(played) / _PLAYED)


def _behind(seed: int) -> Callable[[], int]:
    draw = random.Random(seed)
    return lambda: int(draw.expovariate(1 / _BEHIND))


def excess_terms(structure: Structure, batch_size: int, expected: float) -> tuple[float, float]:
    """What the excess depends on: kinds of operations, and bytes that come and go in blocks small enough for the heap.

    `expected` is `Structure.peak_bytes` at that batch size.
    """
    work = [one for one in structure.trace if one.family != "view"]
    sizes = [(_result_bytes(one, batch_size), one.count) for one in work]
    made = sum(size * count for size, count in sizes)
    small = sum(size * count for size, count in sizes if size <= MOST_HEAP_BLOCK_BYTES) / made if made else 1.0
    passing = max(0.0, expected - structure.idle_bytes(batch_size))
    return float(len(work)), small * passing


def rising(values: Sequence[float]) -> list[float]:
    """The most so far, at each place: blocks too large for the heap spare its holes, but a bound should not count on that."""
    most = 0.0
    return [most := max(most, value) for value in values]


def _result_bytes(one: Operation, batch_size: int) -> float:
    """The size of an operation's largest result, about."""
    dims = one.dims
    names: tuple[str, ...] = ("made",) if "made" in dims else ("given",)
    if "filters" in dims:
        backward = one.family == "conv_backward"
        names = ("batch", "channels", "points_in") if backward else ("batch", "filters", "points_out")
    elif "rows" in dims:
        names = ("batch", "rows", "columns")
    elif names[0] not in dims:
        return one.bytes(batch_size) / 2
    item = 8 if one.dtype in ("float64", "int64") else 2 if one.dtype in ("bfloat16", "float16") else 4
    return item * math.prod(dims[name](batch_size) for name in names)
