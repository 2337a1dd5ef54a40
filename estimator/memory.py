"""Memory that a training step takes: of tensors, and of the process that holds them. Arithmetic on values; loads no torch.

Three figures, each with its meaning:
- expected: the most bytes of torch's CPU allocator alive at once, `Structure.peak_bytes`;
- safe: what the resident memory of the process stays below, above what it held before the model was built;
- the process itself: interpreter, torch, Horovod, readers of data, and the buffer in which gradients are summed. A plan adds it.

Resident memory exceeds live bytes because glibc keeps what is freed. Blocks above 32 MiB are mapped and given back at once;
smaller ones leave holes that the next request of the same size, which asks for its alignment too, often does not fit. With
MALLOC_MMAP_THRESHOLD_ set, the excess of the same steps fell to some MB. Kernels that oneDNN compiles, and code that is read
for the first time, come with each kind of operation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from trainwright.estimator.structure import Operation, Structure

_MAPPED = 32 * 2**20
"""Blocks larger than this are never of the heap (glibc's DEFAULT_MMAP_THRESHOLD_MAX)."""
# Quantile regression of (resident - expected) on the two terms, errors relative to the resident memory, over networks that
# calibration trains, at the 99th percentile: `python tests/benchmarks/estimator/safe.py --fit`. The fit has no fixed part; some
# MiB are added for pages of code that a small model is the first to touch.
_BYTES_PER_KIND = 0.081 * 2**20
_HEAP_SHARE = 1.41
_FIXED_BYTES = 5.0 * 2**20

_PROCESS_BYTES = 420 * 2**20
"""Of a rank before its model: torch, oneDNN, Horovod, TensorBoard, the readers of data (measured)."""


def process_bytes(structure: Structure) -> float:
    """What a rank holds beside its step: the process, and the buffer in which gradients are summed."""
    return _PROCESS_BYTES + float(structure.parameter_bytes)


def safe_bytes(structure: Structure, batch_size: int, expected: float) -> float:
    """Resident bytes that a step stays below, above what the process held before: expected + c0 + c1 · kinds + c2 · heap.

    `expected` is `Structure.peak_bytes` at that batch size.
    """
    kinds, heap = excess_terms(structure, batch_size, expected)
    return expected + _FIXED_BYTES + _BYTES_PER_KIND * kinds + _HEAP_SHARE * heap


def excess_terms(structure: Structure, batch_size: int, expected: float) -> tuple[float, float]:
    """What the excess depends on: kinds of operations, and bytes that come and go in blocks small enough for the heap.

    `expected` is `Structure.peak_bytes` at that batch size.
    """
    work = [one for one in structure.trace if one.family != "view"]
    sizes = [(_result_bytes(one, batch_size), one.count) for one in work]
    made = sum(size * count for size, count in sizes)
    small = sum(size * count for size, count in sizes if size <= _MAPPED) / made if made else 1.0
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
