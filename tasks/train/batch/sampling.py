"""Chooses the samples of each rank at each step. Pure: a function of seed, epoch, position, split.

An epoch is one permutation of the training rows. A step takes the next B rows, and the ranks take
consecutive parts of those. So each row is used exactly once per epoch for any split, even if the
split or B changes within the epoch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from trainwright.tasks.allocate.plan.split import shares as shares
from trainwright.tasks.train.batch.block_order import BlockOrder, RowNumbers

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MOST_PERMUTED = 1 << 20
"""With more rows, an epoch's order is made window by window."""


def epoch_order(
    rows: RowNumbers, seed: int, epoch: int, row_bytes: int = 1
) -> NDArray[np.int64] | BlockOrder:
    """The training rows in the order of this epoch.

    More than about a million rows are in a `BlockOrder`, which depends on the size of a row.
    """
    import numpy as np

    if len(rows) > MOST_PERMUTED:
        return BlockOrder(rows, seed, epoch, row_bytes)
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(
        np.asarray(rows[:], dtype=np.int64)
    )


def steps_per_epoch(rows: int, global_batch_size: int) -> int:
    """The number of steps that take every row once; the last step may be smaller."""
    return math.ceil(rows / global_batch_size)


def steps_left(samples: int, rows: int, epochs: int, global_batch_size: int) -> int:
    """The number of remaining steps with this batch, after `samples` samples of the training."""
    epoch, begin = divmod(samples, rows)
    if epoch >= epochs:
        return 0
    later = (epochs - epoch - 1) * steps_per_epoch(rows, global_batch_size)
    return later + steps_per_epoch(rows - begin, global_batch_size)


def samples_after(step: int, rows: int, global_batch_size: int) -> int:
    """The number of samples in `step` steps with a constant batch."""
    epochs, steps = divmod(step, steps_per_epoch(rows, global_batch_size))
    return epochs * rows + min(rows, steps * global_batch_size)


def split_among(
    total: int,
    members: Sequence[int],
    weights: Sequence[float],
    limits: Mapping[int, int] | None = None,
) -> list[int] | None:
    """Each device's batch, in proportion to the weights and within the limits; 0 for non-members.

    Each member gets at least one sample if there are enough. Returns None if the limits sum up to
    less than `total`.
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
        for number in over:  # the other members share the rest
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


def own_places(
    rows: int, begin: int, split: Sequence[int], rank: int
) -> tuple[tuple[int, int], int]:
    """A rank's places in the epoch's order at the step that begins at `begin`, and its size.

    `rows` is the number of rows of the epoch. The size is B, or the rows left in the epoch.
    """
    total = min(sum(split), rows - begin)
    parts = shares(total, split)
    first = begin + sum(parts[:rank])
    return (first, first + parts[rank]), total
