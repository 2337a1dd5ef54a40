"""The order of the queue, which devices a run may take, and which runs it preempts. Pure.

The level of a run after waiting w seconds is priority + floor(w / AGE_S) (priority aging). A
higher level goes first, then the earlier deadline, then the earlier arrival. So no run starves: a
run that arrives more than (d + 1) * AGE_S after another, with a priority d above it (d >= 0), never
overtakes it.

A waiting run may take only free devices that no run ahead of it wants, so it delays none. A run
ahead that can start does so when it polls next, and leaves the queue.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

AGE_S = 300.0


@dataclass(frozen=True)
class Waiter:
    """A run in the queue that wants at least `needed` of the devices `wanted`.

    Times are seconds since the epoch.
    """

    run: str
    holder: str
    priority: int
    deadline_at: float | None
    enqueued_at: float
    needed: int
    wanted: frozenset[str]


@dataclass(frozen=True)
class Holding:
    """The devices that a run holds and may have to give up."""

    run: str
    priority: int
    token: int
    resources: frozenset[str]


def in_order(waiters: Iterable[Waiter], now: float, age_s: float = AGE_S) -> list[Waiter]:
    """The queue in order, the next run first."""

    def key(waiter: Waiter) -> tuple[float, float, float, str]:
        level = waiter.priority + math.floor(max(0.0, now - waiter.enqueued_at) / age_s)
        deadline = math.inf if waiter.deadline_at is None else waiter.deadline_at
        return (-level, deadline, waiter.enqueued_at, waiter.run)

    return sorted(waiters, key=key)


def available(
    wanted: Iterable[str], ahead: Iterable[Waiter], taken: Iterable[str]
) -> frozenset[str]:
    """The wanted devices that are free and that no run ahead wants."""
    return frozenset(wanted).difference(taken, *(waiter.wanted for waiter in ahead))


def to_revoke(waiter: Waiter, ahead: Sequence[Waiter], held: Sequence[Holding]) -> list[Holding]:
    """The runs that must give up their devices so that the waiter can start.

    They have a strictly lower priority (waiting does not raise it here). Empty if all of them
    together are not enough. The lowest priority comes first, and among equals the run that started
    last, which loses least. The set is minimal: every run in it is necessary.
    """
    taken = frozenset().union(*(one.resources for one in held))
    within = available(waiter.wanted, ahead, ())
    missing = waiter.needed - len(within - taken)
    chosen = []
    for one in sorted(held, key=lambda one: (one.priority, -one.token)):
        gain = len(one.resources & within)
        if missing > 0 and gain and one.priority < waiter.priority:
            chosen.append(one)
            missing -= gain
    if missing > 0:
        return []
    for one in chosen[::-1]:
        gain = len(one.resources & within)
        if missing + gain <= 0:
            chosen.remove(one)
            missing += gain
    return chosen
