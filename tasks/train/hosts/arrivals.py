"""Waits for the hosts of a launch, some of which may be in a cluster's queue for long.

A host that is granted must not wait for all others: two runs might then wait for each other for
ever. So a training begins with the hosts that are there, if they are enough, and the others join.
If they are not enough for long, all are given back, and asked for again some time later.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from trainwright.tasks import progress
from trainwright.tasks.errors import RunHeld
from trainwright.tasks.train.hosts.session import Session
from trainwright.tasks.train.request import Order

BEGIN_AFTER_S = 20.0
"""How long granted hosts wait for queued ones."""
GIVE_BACK_AFTER_S = 90.0
"""After which they are given back if they are too few."""
MOST_PAUSE_S = 60.0
"""Until they are asked for again, at random, so that two runs don't go on blocking each other."""
_CHECK_EVERY_S = 0.5
_END_GRACE_S = 5.0
Message = dict[str, Any]


class Arrivals:
    """The hosts of a launch as they come."""

    def __init__(
        self,
        order: Order,
        sessions: dict[str, Session],
        connect: Callable[[str], Session],
    ) -> None:
        """`sessions` by address; `connect` makes another one, which takes its place there."""
        self._order, self._sessions, self._connect = order, sessions, connect
        self._hellos: dict[Session, Future[Message]] = {}
        self.queued: dict[str, Session] = {}
        """the hosts without which the training has begun, by address"""
        self._taken: set[str] = set()

    def first(self, check_stop: Callable[[], None]) -> dict[Session, Message]:
        """What the hosts say with which the training begins.

        Raises the error of the first host that fails, and RunHeld after the job's `queue_timeout`.
        """
        began = time.monotonic()
        while not self._have_come(began, check_stop):
            progress.emit("notice", message="too few hosts came: they are given back for now")
            for session in self._sessions.values():
                session.close(_END_GRACE_S)
            until = time.monotonic() + random.uniform(0.0, MOST_PAUSE_S)
            while time.monotonic() < until:
                check_stop()
                time.sleep(_CHECK_EVERY_S)
            self._sessions.update({name: self._connect(name) for name in self._sessions})
        found = {one: hello.result() for one, hello in self._hellos.items() if hello.done()}
        self.queued = {name: one for name, one in self._sessions.items() if one not in found}
        if self.queued:
            names = ", ".join(str(one) for one in self.queued.values())
            progress.emit("notice", message=f"training begins without {names}, which join later")
        return found

    def _have_come(self, began: float, check_stop: Callable[[], None]) -> bool:
        """Wait for all hosts, or enough of them; False if it takes too long."""
        workers = ThreadPoolExecutor(len(self._sessions), thread_name_prefix="hello")
        self._hellos = {one: workers.submit(one.hello) for one in self._sessions.values()}
        first_at = math.inf
        try:
            while waiting := [one for one, hello in self._hellos.items() if not hello.done()]:
                check_stop()
                now = time.monotonic()
                for hello in self._hellos.values():
                    if hello.done():
                        hello.result()
                        first_at = min(first_at, now)
                if all(one.queued for one in waiting):
                    if now - first_at > BEGIN_AFTER_S and self._are_enough(waiting):
                        return True
                    if now - began > self._order.request.job.queue_timeout:
                        raise self._timed_out(waiting)
                    if now - first_at > GIVE_BACK_AFTER_S:
                        return False
                wait([self._hellos[one] for one in waiting], timeout=_CHECK_EVERY_S)
            for hello in self._hellos.values():
                hello.result()
        except BaseException:
            for session in self._sessions.values():
                session.hang_up("the launch has ended")
            raise
        finally:
            workers.shutdown(wait=False)
        return True

    def _are_enough(self, waiting: list[Session]) -> bool:
        """Whether the training may begin with the hosts that are there."""
        addresses = {one.address for one in waiting}
        there = sum(one.address not in addresses for one in self._order.request.plan.devices)
        least = self._order.request.job.devices.min_count
        return self._order.mode == "train" and there >= max(1, least)

    def _timed_out(self, waiting: list[Session]) -> RunHeld:
        limit_s = self._order.request.job.queue_timeout
        names = ", ".join(str(one) for one in waiting)
        why = "".join(f"; waits {one}" for one in sorted({one.waits for one in waiting} - {""}))
        return RunHeld(
            f"devices: {names} not granted within queue_timeout ({limit_s:g} s){why}",
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
