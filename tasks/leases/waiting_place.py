"""The place of a run that waits for devices, and who holds them, for those who look at it."""

from __future__ import annotations

from typing import Any

from trainwright.tasks.leases.ledger import Ledger
from trainwright.tasks.leases.queue import Queue


def waiting_place(run: str, ledger: Ledger) -> dict[str, Any] | None:
    """A waiting run's place in the queue; None if the run does not wait.

    `held_by` are the processes that hold its devices, each with the run for which it does.
    Raises ServiceUnreachable.
    """
    queue = Queue(ledger).waiting()
    for place, (waiter, waited_s) in enumerate(queue, start=1):
        if waiter.run != run:
            continue
        leases = [lease for lease in ledger.held("device ") if lease.resource in waiter.wanted]
        holders = {lease.run: lease.holder for lease in leases if lease.run != run}
        return {
            "place": place,
            "waiting": len(queue),
            "waited_s": round(waited_s, 1),
            "needed": waiter.needed,
            "of": len(waiter.wanted),
            "free": len(waiter.wanted) - len({lease.resource for lease in leases}),
            "held_by": [{"holder": holder, "run": held} for held, holder in holders.items()],
        }
    return None
