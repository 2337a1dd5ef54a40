"""The memory of a training step: of tensors, and of the process that holds them.

Arithmetic on values; loads no torch. There are three figures:
- expected: the most bytes of torch's CPU allocator alive at once, `peak_bytes`;
- safe: a bound on the resident memory of the process above what it held before the model was built;
- the process: interpreter, torch, Horovod, readers of data, the buffer in which gradients are
  summed, and copies for checkpoints. A plan adds it.

Resident memory exceeds live bytes because glibc keeps freed memory: `heap_simulation` simulates a
step on a model of its malloc. Kernels that oneDNN compiles, and code pages that are loaded, are
added.

The bound is wide (for held-out processes, at the median a quarter above their memory after six
steps) for two reasons:
- The addresses of blocks depend on small differences in the heap, which addresses and hashes cause.
  Processes of one training differ by 5 % (standard deviation, 440 trainings of the benchmark zoo),
  and one in a hundred by 14 to 24 %. Even a bound from a measurement of the same training would
  have to add 21 % to be exceeded by one process in a hundred. So the bound uses the maximum of
  several simulations, not their mean: if simulations differ more, so do processes.
- The small objects between blocks are random in the simulation, and a table of what operations
  allocate would help little. The real requests to malloc, replayed on malloc itself from holes in
  another order, differ from the process by 9 % (standard deviation of 14 trainings). Without those
  that are freed before the next large block, the result changes by 15 % (sd 14 %); without oneDNN's
  own objects too, by 45 % (sd 36 %), because they fill ends of blocks.

Ranks map blocks until their first update (`freed_memory`) and hold 6 % less at the median. The
bound is the same for them; none of 97 ranks exceeded it.

Bounds without a simulation were tried: quantile regression on code, live bytes, the number of
blocks and the bytes that a step allocates. With at most 1 % of processes above the bound, the best
of them is at the median 46 % above the memory of held-out processes; this one is 23 % above (72
trainings of the zoo, after six steps).
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

# Quantile regression of resident memory on the three terms, with relative errors, at the 99th
# percentile, on networks that calibration trains (`safe.py --networks 200 --fit` among the
# benchmarks); the zoo is not used. Widened by 3 %: then 0.9 % of 462 processes of 231 such networks
# held more after six steps.
_CODE_SHARE, _HELD_SHARE, _BLOCK_SHARE = 1.03, 1.09, 0.60
# Resident pages of files in MiB, by kinds of operations: least squares on such networks.
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
# In use on the heap after some steps and not before, beyond tensors (mallinfo2): non-negative least
# squares on 90 of them.
_LASTING_MIB, _CONVOLUTION_MIB, _PRODUCT_MIB = 0.51, 0.071, 0.054
# For a structure without a simulation: the excess over live bytes, by kinds of operations and by
# temporary bytes in small blocks.
_UNPLAYED_FIXED_BYTES, _UNPLAYED_BYTES_PER_KIND, _UNPLAYED_HEAP_SHARE = (
    5.0 * 2**20,
    0.081 * 2**20,
    1.41,
)
_PLAYED_SIZES, _PLAYS = tuple(2**power for power in range(13)), 8

PROCESS_BYTES = 350 * 2**20
"""A rank before it has its model: torch, oneDNN, Horovod, TensorBoard, data readers.

Assumed if no calibration measured it (`Calibration.process_bytes`)."""


SHARDED_ABOVE_BYTES = 64 << 20
"""If all tensors of a checkpoint together are smaller than this, one rank writes them all."""


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
    """Bytes that a step allocates in blocks of `least_bytes` or more; 0 if lifetimes are not known.

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
    """The memory of a rank besides its step, for a model of this size.

    It is the buffer in which gradients are summed and, if the rank computes in the host's memory,
    two copies of parameters and optimizer state for checkpoints (one rank's; if they are large, the
    ranks share them). A rank of a pipeline may need less (`tasks.allocate.pipelines.stage_copies`).
    """
    # Idle memory without gradients: parameters, buffers, and the optimizer's state.
    state = max(0.0, structure.idle_bytes(0) - structure.parameter_bytes)
    return structure.parameter_bytes + (2 * state if device_type in HOST_MEMORY_TYPES else 0.0)


def safe_bytes(structure: Structure, batch_size: int, expected: float) -> float:
    """A bound on the resident bytes that a step adds: c0 · code + c1 · held + c2 · largest block.

    The largest block is a term because it fits into a hole in some processes only. `expected` is
    `peak_bytes` at that batch size.
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


def recomputed_safe_bytes(safe: float, plain_bytes: float, peak_bytes: float) -> float:
    """The bound if modules are recomputed: the heap holds as much less as the expected peak.

    `safe` is the bound without that; `plain_bytes` and `peak_bytes` are the peaks without and with.
    """
    return safe - _HELD_SHARE * (plain_bytes - peak_bytes)


def code_bytes(structure: Structure) -> float:
    """The memory of loaded code and compiled kernels, by kinds of operations."""
    kinds = {one.kind for one in structure.trace}
    return 2**20 * (_CODE_MIB + sum(size for kind, size in _KIND_CODE_MIB.items() if kind in kinds))


def lasting_bytes(structure: Structure) -> float:
    """Small objects that a first step leaves on the heap: prepared operations, caches, modules."""
    convolutions, products = prepared(structure)
    return 2**20 * (_LASTING_MIB + _CONVOLUTION_MIB * convolutions + _PRODUCT_MIB * products)


def prepared(structure: Structure) -> tuple[int, int]:
    """The counts of convolutions and products, for which libraries keep prepared data.

    Backward convolutions count separately.
    """
    of = Counter(one.family for one in structure.trace)
    return of["conv"] + of["conv_backward"], of["matmul"]


def block_bytes(structure: Structure, batch_size: int) -> float:
    """The largest block that the heap may hold; 0 if lifetimes are not known."""
    if structure.lifetimes is None:
        return 0.0
    sizes = [line(batch_size) for line in structure.lifetimes.sizes]
    sizes += [operation_workspace_bytes(one, batch_size) for one in structure.trace]
    return max((size for size in sizes if size <= MOST_HEAP_BLOCK_BYTES), default=0.0)


def most_held_bytes(structure: Structure) -> Knots | None:
    """The most bytes in the heap's model, by batch size; None if lifetimes are not known.

    It is the maximum of several simulations. They run when a structure is extracted, which stores
    the result, because an estimate must be fast. Beyond the largest simulated batch, the line
    between the last two continues.
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
    """The terms of the excess: the number of kinds of operations, and temporary bytes on the heap.

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
    """The running maximum.

    Blocks too large for the heap leave no holes, but a bound should not fall because of that.
    """
    most = 0.0
    return [most := max(most, value) for value in values]


def _result_bytes(one: Operation, batch_size: int) -> float:
    """The approximate size of an operation's largest result."""
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
