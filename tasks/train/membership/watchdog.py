"""Which ranks hang, judged by their heartbeats. Pure.

A rank that is stopped, or whose machine is, sends no heartbeat. One that hangs in the model's code
sends them, but does not finish its step, and the others wait for it. If all wait, the connection
between them hangs: one is killed, so that the others' sums fail and they get out.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainwright.tasks.runs.artefacts import PlannedDevice
from trainwright.tasks.train.membership.state import MembershipState, RankState

LONG_STEPS = 20
"""No rank counts as hung before it took this many times its planned step."""
STORE_S = 1800.0
"""How long a rank that reads or writes a checkpoint may keep the others waiting."""
LOADING_S = 1800.0
"""How long a process that loads may send no heartbeat: an import may hold Python's lock."""
ABORT_S = 2.0
"""How long a rank that waits may take to leave an aborted group: its connections to the others are
shut, so its sum fails at once, unless it hangs where that has no effect."""
Hung = list[tuple[RankState, str]]
"""Ranks that hang, and why each is killed."""


def stall_timeout_s(
    stall_timeout: float, devices: Sequence[PlannedDevice], split: Sequence[int]
) -> float:
    """How long a rank may keep the others waiting: as the job says, or longer if its steps are.

    `split` is each device's current batch: many times the planned one if others are lost.
    """
    steps = (
        device.step_time_s.high * max(1.0, batch / max(1, device.batch_size))
        for device, batch in zip(devices, split, strict=True)
    )
    return max(stall_timeout, LONG_STEPS * max(steps, default=0.0))


def hung(state: MembershipState) -> Hung:
    """Ranks that hang while they load, in their group, or on the way out of it."""
    timeout_s = stall_timeout_s(state.faults.stall_timeout, state.devices, state.split)
    found = [
        (rank, f"sent no heartbeat for {LOADING_S:.0f} s while loading and was killed")
        for rank in state.loading()
        if state.now - rank.heard_at > LOADING_S
    ]
    if state.aborted_at is None:
        return found + hung_members(state.inside(), state.now, timeout_s)
    aborted_s = state.now - state.aborted_at
    return found + stuck_members(state.inside(), state.now, timeout_s, aborted_s)


def hung_members(members: Sequence[RankState], now: float, timeout_s: float) -> Hung:
    """Members of a group that hang, or keep the others waiting."""
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
    """Members that do not leave a group that was aborted so long ago.

    That they wait says nothing of the others. One that computes notices at its next sum.
    """
    found = _stalled(members, now, timeout_s)
    for rank in members:
        waits = rank.waits_s is not None and rank.waits_s > ABORT_S / 2 and not rank.done
        patience_s = max(timeout_s, STORE_S) if rank.writing else timeout_s
        if aborted_s > (ABORT_S if waits or rank.status == "joining" else patience_s):
            found.append((rank, "did not leave a group that had lost a rank and was killed"))
    return found


def _stalled(members: Sequence[RankState], now: float, timeout_s: float) -> Hung:
    """Members without a heartbeat, or without the end of a step, for too long."""
    silent = [rank for rank in members if now - rank.heard_at > timeout_s]
    slow = [rank for rank in members if (rank.computes_s or 0.0) > timeout_s]
    no_heartbeat = f"sent no heartbeat for {timeout_s:.0f} s and was killed"
    no_step = f"computed for {timeout_s:.0f} s without finishing a step and was killed"
    found = [(rank, no_heartbeat) for rank in silent]
    return found + [(rank, no_step) for rank in slow if rank not in silent]
