"""Which samples each rank takes at each step. Pure: a function of seed, epoch, position and split.

An epoch is one permutation of the training rows. A step takes the next B of them, and the ranks take consecutive parts of
those. So every row is taken exactly once an epoch for any split, and for any change of the split or of B within the epoch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def epoch_order(
    rows: Sequence[int] | NDArray[np.int64], seed: int, epoch: int
) -> NDArray[np.int64]:
    """The training rows in the order of an epoch."""
    import numpy as np

    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(
        np.asarray(rows, dtype=np.int64)
    )


def steps_per_epoch(rows: int, global_batch_size: int) -> int:
    """How many steps take every row once; the last one may be smaller."""
    return math.ceil(rows / global_batch_size)


def steps_left(samples: int, rows: int, epochs: int, global_batch_size: int) -> int:
    """How many steps there are from here on, with this batch, after so many samples."""
    epoch, begin = divmod(samples, rows)
    if epoch >= epochs:
        return 0
    later = (epochs - epoch - 1) * steps_per_epoch(rows, global_batch_size)
    return later + steps_per_epoch(rows - begin, global_batch_size)


def samples_after(step: int, rows: int, global_batch_size: int) -> int:
    """How many samples so many steps take, with one batch throughout."""
    epochs, steps = divmod(step, steps_per_epoch(rows, global_batch_size))
    return epochs * rows + min(rows, steps * global_batch_size)


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
    total: int,
    members: Sequence[int],
    weights: Sequence[float],
    limits: Mapping[int, int] | None = None,
) -> list[int] | None:
    """The batch of each device, 0 for those that are no members: in the proportion of the weights, none above its limit.

    At least one sample each where there are enough. None where the limits hold fewer than `total`.
    """
    limits = limits or {}
    free, left, split = list(members), total, [0] * len(weights)
    while free:
        part = _proportional(left, [weights[number] for number in free])
        over = [
            number
            for number, size in zip(free, part, strict=True)
            if size > limits.get(number, total)
        ]
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


def own_part(
    order: NDArray[np.int64], begin: int, split: Sequence[int], rank: int
) -> tuple[NDArray[np.int64], int]:
    """A rank's rows at the step that begins after so many of the epoch's, and how many all take together (B, or what is left)."""
    rows = order[begin : begin + sum(split)]
    parts = shares(len(rows), split)
    first = sum(parts[:rank])
    return rows[first : first + parts[rank]], len(rows)
