"""The cuts for given orders of devices: `suffix_table`'s recursion with the order fixed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainwright.tasks.allocate.actions.schedules import in_flight
from trainwright.tasks.allocate.pipelines.pass_times import Division
from trainwright.tasks.allocate.pipelines.stage_chain import StageChain
from trainwright.tasks.allocate.pipelines.suffix_table import SuffixBound
from trainwright.tasks.runs.artefacts.layout import StageSchedule

_MOST_PLACES = 48
"""Longer chains are cut at so many places only."""
_AT_ONCE = 256


def with_cuts(
    chain: StageChain, schedule: StageSchedule, orders: Sequence[tuple[int, ...]]
) -> list[Division]:
    """The division with the least bound for each order of devices; none if it does not fit.

    All orders have as many devices.
    """
    found: list[Division] = []
    for begin in range(0, len(orders), _AT_ONCE):
        found += _with_cuts(chain, schedule, orders[begin : begin + _AT_ONCE])
    return found


def _with_cuts(
    chain: StageChain, schedule: StageSchedule, orders: Sequence[tuple[int, ...]]
) -> list[Division]:
    import numpy as np

    devices = np.array(orders)
    count, stages = devices.shape
    places = _places(chain.units, stages)
    bound = SuffixBound(chain, schedule)
    best: Any = None
    chosen: list[Any] = []
    empty = np.arange(len(places))[None, :] <= np.arange(len(places))[:, None]
    for stage in range(stages - 1, -1, -1):
        own = devices[:, stage]
        behind = stages - stage
        work, added = bound.spans(own, places, behind)
        flight = in_flight(schedule, stages, stage, chain.micro_batches)
        need = chain.sums(chain.state_bytes + flight * chain.kept_bytes)[places]
        room = chain.room_bytes[own] * (1 + 1e-9)
        no = empty[None] | (need[None, None, :] - need[None, :, None] > room[:, None, None])
        if best is None:
            best = np.where(no[:, :, -1], np.inf, work[:, :, -1])
            continue
        rest = best + bound.messages(own, devices[:, stage + 1], places)
        total = np.where(no, np.inf, np.maximum(work, added + rest[:, None, :]))
        total[:, :, -1] = np.inf  # stages are left
        chosen.append(total.argmin(axis=2))
        best = total.min(axis=2)
    found, at = [], np.zeros(count, dtype=int)
    cuts = []
    for cut in reversed(chosen):
        at = cut[np.arange(count), at]
        cuts.append(places[at])
    for number in np.flatnonzero(best[:, 0] < np.inf).tolist():
        own_cuts = tuple(int(one[number]) for one in cuts)
        found.append(Division(tuple(orders[number]), own_cuts))
    return found


def _places(units: int, stages: int) -> Any:
    """Where the chain may be cut, both ends included."""
    import numpy as np

    most = max(_MOST_PLACES, 2 * stages)
    if units <= most:
        return np.arange(units + 1)
    return np.unique(np.linspace(0, units, most + 1).round().astype(int))
