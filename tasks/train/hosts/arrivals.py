"""Waits for the hosts of a launch, some of which may be in a cluster's queue for long.

A host that is granted must not wait for all others: two runs might then wait for each other for
ever. So a training begins with the hosts that are there, if they are enough, and the others join.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from trainwright.tasks import progress
from trainwright.tasks.errors import RunHeld
from trainwright.tasks.train.hosts.session import Session
from trainwright.tasks.train.request import Order

BEGIN_AFTER_S = 20.0
"""How long granted hosts wait for queued ones."""
_CHECK_EVERY_S = 0.5
Message = dict[str, Any]


class Arrivals:
    """The hosts of a launch as they come."""

    def __init__(self, order: Order, sessions: Mapping[str, Session]) -> None:
        self._order, self._sessions = order, sessions
        self._workers = ThreadPoolExecutor(max_workers=len(sessions), thread_name_prefix="hello")
        self._hellos: dict[Session, Future[Message]] = {
            session: self._workers.submit(session.hello) for session in sessions.values()
        }
        self.queued: dict[str, Session] = {}
        """the hosts without which the training has begun, by address"""
        self._taken: set[str] = set()

    def first(self, check_stop: Callable[[], None]) -> dict[Session, Message]:
        """What the hosts say with which the training begins.

        Raises the error of the first host that fails, and RunHeld after the job's `queue_timeout`.
        """
        began = time.monotonic()
        first_at: float | None = None
        try:
            while waiting := [one for one, hello in self._hellos.items() if not hello.done()]:
                check_stop()
                for hello in self._hellos.values():
                    if hello.done():
                        hello.result()
                        first_at = first_at or time.monotonic()
                queued = all(one.queued for one in waiting)
                if queued and self._enough(first_at, waiting):
                    break
                if queued and time.monotonic() - began > self._order.request.job.queue_timeout:
                    raise self._timed_out(waiting)
                wait([self._hellos[one] for one in waiting], timeout=_CHECK_EVERY_S)
            found = {one: hello.result() for one, hello in self._hellos.items() if hello.done()}
        except BaseException:
            for session in self._sessions.values():
                session.hang_up("the launch has ended")
            raise
        finally:
            self._workers.shutdown(wait=False)
        self.queued = {name: one for name, one in self._sessions.items() if one not in found}
        if self.queued:
            names = ", ".join(str(one) for one in self.queued.values())
            progress.emit("notice", message=f"training begins without {names}, which join later")
        return found

    def _enough(self, first_at: float | None, waiting: list[Session]) -> bool:
        """Whether the training may begin now with the hosts that are there."""
        late = first_at is not None and time.monotonic() - first_at > BEGIN_AFTER_S
        addresses = {one.address for one in waiting}
        there = sum(one.address not in addresses for one in self._order.request.plan.devices)
        least = self._order.request.job.devices.min_count
        return self._order.mode == "train" and late and there >= max(1, least)

    def _timed_out(self, waiting: list[Session]) -> RunHeld:
        limit_s = self._order.request.job.queue_timeout
        names = ", ".join(str(one) for one in waiting)
        return RunHeld(
            f"devices: {names} not granted within queue_timeout ({limit_s:g} s); `squeue --me` "
            "shows why",
            waited_s=limit_s,
        )

    def take(self, address: str) -> Session | None:
        """The queued connection to a host, once; None if another one must be made."""
        if address in self.queued and address not in self._taken:
            self._taken.add(address)
            return self.queued[address]
        return None

    def hello(self, session: Session) -> Message:
        """What a host says, when it comes. Raises as `Session.hello`."""
        hello = self._hellos.pop(session, None)
        return session.hello() if hello is None else hello.result()
