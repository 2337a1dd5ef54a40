"""Which samples each rank takes at each step. Pure: a function of seed, epoch, step and split.

An epoch is one permutation of the training rows. Step k takes its slice [k·B, (k + 1)·B), and the ranks take consecutive parts of
that slice. So every row is taken exactly once an epoch for any split, and for any change of the split within the epoch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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


def own_part(order: NDArray[np.int64], step: int, split: Sequence[int], rank: int) -> tuple[NDArray[np.int64], int]:
    """A rank's rows at a step of the epoch, and how many rows all ranks take together (B, or fewer at the end)."""
    size = sum(split)
    rows = order[step * size : (step + 1) * size]
    parts = shares(len(rows), split)
    begin = sum(parts[:rank])
    return rows[begin : begin + parts[rank]], len(rows)
