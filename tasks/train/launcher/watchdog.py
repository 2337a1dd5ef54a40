"""Which ranks hang, by what their signs of life say. Pure.

A rank that is stopped, or whose machine is, gives no sign. One that hangs in the model's code does, but it does not come to the
end of its step, and the others wait. Where all wait, the connection between them hangs, and one is given up so that the others
come out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainwright.tasks.train.launcher.rank_process import Worker
    from trainwright.tasks.train.request import TrainRequest

LONG_STEPS, WRITING_S = 20, 1800.0
"""No rank counts as hung before it took so many times its planned step, or, while one waits for the store, so long."""
OUT_S = 2.0
"""Who is called out of a broken world has this long: after it, it is stuck where no word reaches it."""


def stall_s(request: TrainRequest, split: Sequence[int]) -> float:
    """How long a rank may keep the others waiting, in seconds: as the job says, and never less than its steps need.

    `split` is the batch of each device by now, which may be many times the planned one where others are lost.
    """
    longest_s = max(
        (
            device.step_time_s.high * max(1.0, batch / max(1, device.batch_size))
            for device, batch in zip(request.plan.devices, split, strict=True)
        ),
        default=0.0,
    )
    return max(request.job.train.faults.stall_timeout, LONG_STEPS * longest_s)


def hung(
    ranks: Sequence[Worker], now: float, stall_s: float, *, broken: bool = False
) -> list[tuple[Worker, str]]:
    """Who hangs in a world, and why it is thought so. Of one that is broken, how long its ranks wait tells nothing of them."""
    found = [
        (rank, f"gave no sign of life for {stall_s:.0f} s and was killed")
        for rank in ranks
        if now - rank.heard_at > stall_s
    ] + [
        (rank, f"computed for {stall_s:.0f} s without coming to the end of a step and was killed")
        for rank in ranks
        if now - rank.heard_at <= stall_s and (rank.computes_s or 0.0) > stall_s
    ]
    limit_s = max(stall_s, WRITING_S) if any(rank.writing for rank in ranks) else stall_s
    waiting = [rank for rank in ranks if rank.waits_s is not None]
    long = [rank for rank in waiting if (rank.waits_s or 0.0) > limit_s]
    if found or broken or not long:
        return found
    culprits = [rank for rank in ranks if rank.waits_s is None] or (
        waiting[-1:] if long == waiting else []
    )
    return [(rank, f"let the others wait for {limit_s:.0f} s and was killed") for rank in culprits]


def stuck(ranks: Sequence[Worker], broken_for_s: float) -> list[Worker]:
    """Who does not come out of a world that broke so long ago. Who computes comes out at its next sum."""
    if broken_for_s < OUT_S:
        return []
    return [
        rank
        for rank in ranks
        if rank.state == "joining"
        or (rank.waits_s is not None and rank.waits_s > OUT_S / 2 and rank.done is None)
    ]
