"""Which samples each rank takes at each step. Pure: a function of seed, epoch, step and split.

An epoch is one permutation of the training rows. Step k takes its slice [k·B, (k + 1)·B), and the ranks take consecutive parts of
that slice. So every row is taken exactly once an epoch for any split, and for any change of the split within the epoch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def epoch_order(rows: Sequence[int] | NDArray[np.int64], seed: int, epoch: int) -> NDArray[np.int64]:
    """The training rows in the order of an epoch."""
    import numpy as np

    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(np.asarray(rows, dtype=np.int64))


def steps_per_epoch(rows: int, global_batch_size: int) -> int:
    """How many steps take every row once; the last one may be smaller."""
    return math.ceil(rows / global_batch_size)


def shares(count: int, split: Sequence[int]) -> list[int]:
    """`count` samples in the proportion of the split (largest remainder, ties to the earlier rank)."""
    total = sum(split)
    if count == total:
        return list(split)
    exact = [count * part / total for part in split]
    whole = [math.floor(value) for value in exact]
    by_remainder = sorted(range(len(split)), key=lambda rank: (whole[rank] - exact[rank], rank))
    for rank in by_remainder[: count - sum(whole)]:
        whole[rank] += 1
    return whole


def split_among(
    total: int, members: Sequence[int], weights: Sequence[float], limits: Mapping[int, int] | None = None
) -> list[int] | None:
    """The batch of each device, 0 for those that are no members: in the proportion of the weights, none above its limit.

    At least one sample each where there are enough. None where the limits hold fewer than `total`.
    """
    limits = limits or {}
    free, left, split = list(members), total, [0] * len(weights)
    while free:
        part = _proportional(left, [weights[number] for number in free])
        over = [number for number, size in zip(free, part, strict=True) if size > limits.get(number, total)]
        if not over:
            for number, size in zip(free, part, strict=True):
                split[number] = size
            return split
        for number in over:  # what they can't take, the others share
            split[number] = limits[number]
            left -= limits[number]
        free = [number for number in free if number not in over]
    return split if left == 0 else None


def _proportional(total: int, weights: Sequence[float]) -> list[int]:
    scale = [1.0] * len(weights) if sum(weights) <= 0 else list(weights)
    least = 1 if total >= len(weights) else 0
    exact = [(total - least * len(scale)) * weight / sum(scale) for weight in scale]
    whole = [math.floor(value) for value in exact]
    by_remainder = sorted(range(len(scale)), key=lambda at: (whole[at] - exact[at], at))
    for at in by_remainder[: total - least * len(scale) - sum(whole)]:
        whole[at] += 1
    return [size + least for size in whole]


def own_part(order: NDArray[np.int64], step: int, split: Sequence[int], rank: int) -> tuple[NDArray[np.int64], int]:
    """A rank's rows at a step of the epoch, and how many rows all ranks take together (B, or fewer at the end)."""
    size = sum(split)
    rows = order[step * size : (step + 1) * size]
    parts = shares(len(rows), split)
    begin = sum(parts[:rank])
    return rows[begin : begin + parts[rank]], len(rows)
