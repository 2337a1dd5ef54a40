"""Who is next: the order of the queue, what a waiter may take, and whose devices it may ask for. Arithmetic on values.

Level of a waiter after waiting w seconds: priority + floor(w / AGE_S). A higher level goes first, then the earlier deadline, then
the earlier arrival. So nobody starves: who arrives more than (d + 1) * AGE_S after a waiter, with a priority d above it
(d >= 0), stands behind it for good.

A waiter may take free devices that nobody ahead of it wants, and no others: whoever stands behind can't delay it. (What is
ahead of it and can start does so at its next look, and leaves the queue.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

AGE_S = 300.0


@dataclass(frozen=True)
class Waiter:
    """A run in the queue. It wants at least `needed` of the devices `wanted`. Times are seconds since the epoch."""

    run: str
    holder: str
    priority: int
    deadline_at: float | None
    enqueued_at: float
    needed: int
    wanted: frozenset[str]


@dataclass(frozen=True)
class Held:
    """The devices of a run that others may ask for."""

    run: str
    priority: int
    token: int
    resources: frozenset[str]


def in_order(waiters: Iterable[Waiter], now: float, age_s: float = AGE_S) -> list[Waiter]:
    """The queue, the next one first."""

    def key(waiter: Waiter) -> tuple[float, float, float, str]:
        level = waiter.priority + math.floor(max(0.0, now - waiter.enqueued_at) / age_s)
        deadline = math.inf if waiter.deadline_at is None else waiter.deadline_at
        return (-level, deadline, waiter.enqueued_at, waiter.run)

    return sorted(waiters, key=key)


def available(
    wanted: Iterable[str], ahead: Iterable[Waiter], taken: Iterable[str]
) -> frozenset[str]:
    """Of the wanted devices, those that are free and that nobody ahead wants."""
    return frozenset(wanted).difference(taken, *(waiter.wanted for waiter in ahead))


def to_revoke(waiter: Waiter, ahead: Sequence[Waiter], held: Sequence[Held]) -> list[Held]:
    """The runs to be asked for their devices, so that the waiter can start: of the least priority, and none too many.

    Without any one of them the others would not suffice; who is not needed goes free from the highest priority down. Only runs
    of a strictly lower priority of their own (waiting does not raise it here), and none where all of them would not suffice.
    Among equals the one that started last, which loses least.
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
