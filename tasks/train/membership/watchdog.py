"""Finds ranks that hang, from their heartbeats. Pure.

A stopped rank, or one on a stopped machine, sends no heartbeat. A rank that hangs in the model's
code sends heartbeats but does not finish its step, and the others wait for it. If all ranks wait,
a connection hangs: the watchdog kills one rank, so that the others' sums fail and they can leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trainwright.tasks.runs.artefacts.plan import PlannedDevice
from trainwright.tasks.train.membership.state import MembershipState, RankState

LONG_STEPS = 20
"""A rank counts as hung only after this many times its planned step."""
STORE_S = 1800.0
"""How long the others may wait for a rank that reads or writes a checkpoint."""
LOADING_S = 1800.0
"""How long a loading process may send no heartbeat: an import may hold Python's lock."""
ABORT_S = 2.0
"""How long a waiting rank may take to leave an aborted group. Its connections are shut, so its sum
fails at once, unless it hangs where that has no effect."""
Hung = list[tuple[RankState, str]]
"""Ranks that hang, each with the reason to kill it."""


def stall_timeout_s(
    stall_timeout: float, devices: Sequence[PlannedDevice], split: Sequence[int]
) -> float:
    """How long the others may wait for a rank: the job's timeout, or longer if steps take longer.

    `split` is each device's current batch: a multiple of the planned one if devices were lost.
    """
    steps = (
        device.step_time_s.high * max(1.0, batch / max(1, device.batch_size))
        for device, batch in zip(devices, split, strict=True)
    )
    return max(stall_timeout, LONG_STEPS * max(steps, default=0.0))


def hung(state: MembershipState) -> Hung:
    """Ranks that hang while loading, in their group, or while leaving it."""
    timeout_s = stall_timeout_s(state.faults.stall_timeout, state.devices, state.split)
    found = [
        (rank, f"sent no heartbeat for {LOADING_S:.0f} s while loading and was killed")
        for rank in state.loading()
        if state.now - max(rank.heard_at, state.awake_since) > LOADING_S
    ]
    members = [_since_waking(rank, state) for rank in state.inside()]
    if state.aborted_at is None:
        hanging = hung_members(members, state.now, timeout_s)
    else:
        aborted_s = state.now - max(state.aborted_at, state.awake_since)
        hanging = stuck_members(members, state.now, timeout_s, aborted_s)
    return found + [(state.ranks[rank.number], reason) for rank, reason in hanging]


def _since_waking(rank: RankState, state: MembershipState) -> RankState:
    """A rank as if it and the others had waited only since the launcher runs again."""
    awake_s = state.now - state.awake_since
    return replace(
        rank,
        heard_at=max(rank.heard_at, state.awake_since),
        waits_s=None if rank.waits_s is None else min(rank.waits_s, awake_s),
        computes_s=None if rank.computes_s is None else min(rank.computes_s, awake_s),
    )


def hung_members(members: Sequence[RankState], now: float, timeout_s: float) -> Hung:
    """Members of a group that hang, or for which the others wait too long."""
    found = _stalled(members, now, timeout_s)
    limit_s = max(timeout_s, STORE_S) if any(rank.writing for rank in members) else timeout_s
    waiting = [rank for rank in members if rank.waits_s is not None]
    long = [rank for rank in waiting if (rank.waits_s or 0.0) > limit_s]
    if found or not long:
        return found
    culprits = [rank for rank in members if rank.waits_s is None] or (
        waiting[-1:] if long == waiting else []
    )
    reason = f"kept the others waiting for {limit_s:.0f} s and was killed"
    return [(rank, reason) for rank in culprits]


def stuck_members(
    members: Sequence[RankState], now: float, timeout_s: float, aborted_s: float
) -> Hung:
    """Members that have not left a group that was aborted `ABORT_S` ago or earlier.

    Only ranks that wait count. A rank that computes notices the abort at its next sum.
    """
    found = _stalled(members, now, timeout_s)
    for rank in members:
        waits = rank.waits_s is not None and rank.waits_s > ABORT_S / 2 and not rank.done
        patience_s = max(timeout_s, STORE_S) if rank.writing else timeout_s
        if aborted_s > (ABORT_S if waits or rank.status == "joining" else patience_s):
            found.append((rank, "did not leave its aborted group and was killed"))
    return found


def _stalled(members: Sequence[RankState], now: float, timeout_s: float) -> Hung:
    """Members without a heartbeat, or without a finished step, for too long."""
    silent = [rank for rank in members if now - rank.heard_at > timeout_s]
    slow = [rank for rank in members if (rank.computes_s or 0.0) > timeout_s]
    no_heartbeat = f"sent no heartbeat for {timeout_s:.0f} s and was killed"
    no_step = f"computed for {timeout_s:.0f} s without finishing a step and was killed"
    found = [(rank, no_heartbeat) for rank in silent]
    return found + [(rank, no_step) for rank in slow if rank not in silent]
