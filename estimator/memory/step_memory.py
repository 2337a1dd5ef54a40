"""Memory that a training step takes: of tensors, and of the process that holds them. Arithmetic on values; loads no torch.

Three figures, each with its meaning:
- expected: the most bytes of torch's CPU allocator alive at once, `peak_bytes`;
- safe: what the resident memory of the process stays below, above what it held before the model was built;
- the process itself: interpreter, torch, Horovod, readers of data, the buffer in which gradients are summed, and copies for
  checkpoints. A plan adds it.

Resident memory exceeds live bytes because glibc keeps what is freed: `play` plays a step on a model of its malloc. Kernels that
oneDNN compiles, and code that is read for the first time, come on top.

Why the bound is wide (at the median of held-out processes a quarter more than they held after six steps):
- where blocks come to lie hangs on the least thing that the heap held before, which addresses and hashes draw: the processes of
  one training differ by 5 % (standard deviation, 440 trainings of the zoo), one in a hundred by 14 to 24 %; where both are the
  same, hardly any do. Who had measured the very training, once, and wanted to be below one process of a hundred, would have to
  add 21 %. So the most of several plays is counted, not their mean: the more plays differ, the more do processes;
- the small things between the blocks are drawn (`play`), and a table of what operations keep would say little more: what malloc
  was really asked for, played on malloc itself from holes in another order, differs from the process by 9 % (the standard
  deviation of 14 trainings). Leaving out what is freed before the next large block moves it by 15 % (sd 14 %), oneDNN's own
  objects too by 45 % (sd 36 %): they fill the ends of blocks in which small things would lie else.

Ranks map blocks until their first update (`freed_memory`), and hold less, 6 % at the median; of 97 none held more than the
bound, which is one for both.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from trainwright.estimator.curves import Knots
from trainwright.estimator.devices import HOST_MEMORY_TYPES
from trainwright.estimator.memory.freed_memory import MOST_HEAP_BLOCK_BYTES
from trainwright.estimator.memory.heap_simulation import high_water_bytes
from trainwright.estimator.memory.workspace import operation_workspace_bytes
from trainwright.estimator.structure import Operation, Structure

# Quantile regression of resident memory on the three terms, errors relative, at the 99th percentile, of networks that calibration
# trains, as `tests/benchmarks/estimator/safe.py --networks 200 --fit` does it; the zoo has no part in it. Widened by 3 %: then
# 0.9 % of 462 processes of 231 such networks held more after six steps.
_CODE_SHARE, _HELD_SHARE, _BLOCK_SHARE = 1.03, 1.09, 0.60
# Resident pages of files in MiB, by the kinds of operations: least squares, of such networks.
_CODE_MIB = 0.8
_KIND_CODE_MIB = {
    "aten._embedding_bag_backward": 2.1,
    "aten._scaled_dot_product_flash_attention_for_cpu": 0.7,
    "aten.add": 1.4,
    "aten.addmm": 1.1,
    "aten.cat": 1.2,
    "aten.clamp_min": 0.8,
    "aten.clone": 0.4,
    "aten.convolution": 1.9,
    "aten.elu": 0.5,
    "aten.empty": 1.2,
    "aten.gelu": 1.3,
    "aten.hardswish": 0.3,
    "aten.leaky_relu": 0.4,
    "aten.mkldnn_rnn_layer": 3.6,
    "aten.native_group_norm": 1.2,
    "aten.native_layer_norm": 1.5,
    "aten.nll_loss_backward": 0.3,
    "aten.sigmoid": 0.5,
    "aten.tanh": 0.6,
}
# In use on the heap after some steps and not before, beyond tensors (mallinfo2): least squares, none negative, of 90 of them.
_LASTING_MIB, _CONVOLUTION_MIB, _PRODUCT_MIB = 0.51, 0.071, 0.054
# Of a structure that was not played: the excess over live bytes, by the kinds and by what comes and goes in small blocks.
_UNPLAYED_FIXED_BYTES, _UNPLAYED_BYTES_PER_KIND, _UNPLAYED_HEAP_SHARE = (
    5.0 * 2**20,
    0.081 * 2**20,
    1.41,
)
_PLAYED_SIZES, _PLAYS = tuple(2**power for power in range(13)), 8

PROCESS_BYTES = 420 * 2**20
"""Of a rank before its model: torch, oneDNN, Horovod, TensorBoard, the readers of data (measured)."""


def peak_bytes(structure: Structure, batch_size: int) -> float:
    """The most bytes alive at once in a step: of each operation, live tensors and its workspace."""
    return max(
        (
            one.live_bytes(batch_size) + operation_workspace_bytes(one, batch_size)
            for one in structure.trace
        ),
        default=structure.peak_memory_bytes(batch_size),
    )


def made_bytes(structure: Structure, batch_size: int, least_bytes: float) -> float:
    """Bytes that a step makes in blocks of `least_bytes` or more; 0 if lifetimes are not known.

    The workspace of recurrent layers does not count: its pages are not new in each step (their page
    faults were counted).
    """
    if structure.lifetimes is None:
        return 0.0
    workspaces = [
        0.0 if one.family == "rnn" else operation_workspace_bytes(one, batch_size)
        for one in structure.trace
    ]
    return structure.lifetimes.made_bytes(batch_size, workspaces, least_bytes)


def kept_bytes(structure: Structure, device_type: str) -> float:
    """What a rank holds beside its step for a model of this size.

    The buffer in which gradients are summed, and, where it computes in the host's memory, two copies of parameters and optimizer
    state on their way into checkpoints (one rank's; where they are large, the ranks share them).
    """
    state = max(0.0, structure.idle_bytes(0) - structure.parameter_bytes)  # idle, but for gradients
    return structure.parameter_bytes + (2 * state if device_type in HOST_MEMORY_TYPES else 0.0)


def safe_bytes(structure: Structure, batch_size: int, expected: float) -> float:
    """Resident bytes that a step stays below, above what the process held before: c0 · code + c1 · held + c2 · largest block.

    The latter: whether a block finds room in a hole differs between processes. `expected` is `peak_bytes` at that batch
    size.
    """
    if structure.most_held_bytes is None:
        kinds, heap = excess_terms(structure, batch_size, expected)
        return (
            expected
            + _UNPLAYED_FIXED_BYTES
            + _UNPLAYED_BYTES_PER_KIND * kinds
            + _UNPLAYED_HEAP_SHARE * heap
        )
    held = max(expected, structure.most_held_bytes(batch_size))
    return (
        _CODE_SHARE * code_bytes(structure)
        + _HELD_SHARE * held
        + _BLOCK_SHARE * block_bytes(structure, batch_size)
    )


def code_bytes(structure: Structure) -> float:
    """Code that is read for the first time, and kernels that are compiled, about: by the kinds of operations."""
    kinds = {one.kind for one in structure.trace}
    return 2**20 * (_CODE_MIB + sum(size for kind, size in _KIND_CODE_MIB.items() if kind in kinds))


def lasting_bytes(structure: Structure) -> float:
    """Small things on the heap that a first step leaves for good: what is prepared for each operation, caches, modules."""
    convolutions, products = prepared(structure)
    return 2**20 * (_LASTING_MIB + _CONVOLUTION_MIB * convolutions + _PRODUCT_MIB * products)


def prepared(structure: Structure) -> tuple[int, int]:
    """The operations for which libraries keep what they prepared: convolutions, backward ones on their own, and products."""
    of = Counter(one.family for one in structure.trace)
    return of["conv"] + of["conv_backward"], of["matmul"]


def block_bytes(structure: Structure, batch_size: int) -> float:
    """The largest block that the heap may hold; 0 where lifetimes are not known."""
    if structure.lifetimes is None:
        return 0.0
    sizes = [line(batch_size) for line in structure.lifetimes.sizes]
    sizes += [operation_workspace_bytes(one, batch_size) for one in structure.trace]
    return max((size for size in sizes if size <= MOST_HEAP_BLOCK_BYTES), default=0.0)


def most_held_bytes(structure: Structure) -> Knots | None:
    """What the heap's model holds at most over the batch size, the most of several plays; None where lifetimes are not known.

    It is played when a structure is extracted, and kept in it: an estimate has less time. Beyond the largest batch that is played
    it goes on as between the last two.
    """
    lifetimes = structure.lifetimes
    if lifetimes is None:
        return None
    held = []
    for batch_size in _PLAYED_SIZES:
        workspaces = [operation_workspace_bytes(one, batch_size) for one in structure.trace]
        held.append(
            max(
                high_water_bytes(
                    lifetimes, batch_size, workspaces, range(_PLAYS), lasting_bytes(structure)
                )
            )
        )
    return Knots(sizes=_PLAYED_SIZES, values=tuple(held))


def excess_terms(structure: Structure, batch_size: int, expected: float) -> tuple[float, float]:
    """What the excess depends on: kinds of operations, and bytes that come and go in blocks small enough for the heap.

    `expected` is `peak_bytes` at that batch size.
    """
    work = [one for one in structure.trace if one.family != "view"]
    sizes = [(_result_bytes(one, batch_size), one.count) for one in work]
    made = sum(size * count for size, count in sizes)
    small = (
        sum(size * count for size, count in sizes if size <= MOST_HEAP_BLOCK_BYTES) / made
        if made
        else 1.0
    )
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
        names = (
            ("batch", "channels", "points_in") if backward else ("batch", "filters", "points_out")
        )
    elif "rows" in dims:
        names = ("batch", "rows", "columns")
    elif names[0] not in dims:
        return one.bytes(batch_size) / 2
    item = (
        8 if one.dtype in ("float64", "int64") else 2 if one.dtype in ("bfloat16", "float16") else 4
    )
    return item * math.prod(dims[name](batch_size) for name in names)
