"""Threads in which a rank meets the others of a new group.

Gloo waits for a member that was lost until its own timeout, and nothing ends that wait. So another
thread waits, which the rank leaves behind if the launcher aborts the group.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from typing import TypeVar

from trainwright.tasks.train.exchange.collective import PeersLost

T = TypeVar("T")
_POLL_S = 0.05


class MeetingThreads:
    """Threads that start at once, so that what they start inherits this thread's CPU limits."""

    def __init__(self, count: int) -> None:
        """`count`: one more than can be left behind at a time."""
        self._threads = concurrent.futures.ThreadPoolExecutor(count, "meeting")
        started = threading.Barrier(count + 1)
        for _ in range(count):
            self._threads.submit(started.wait)
        started.wait()

    def run(
        self,
        act: Callable[[], T],
        is_aborted: Callable[[], bool] = lambda: False,
        undo: Callable[[T], None] = lambda found: None,
    ) -> T:
        """The result of `act`. Raises its error, and PeersLost if the group is aborted before.

        In that case `undo` gets the result when there is one.
        """
        future = self._threads.submit(act)
        while not concurrent.futures.wait([future], _POLL_S).done:
            if is_aborted():

                def ended(one: concurrent.futures.Future[T]) -> None:
                    if one.exception() is None:
                        undo(one.result())

                future.add_done_callback(ended)
                raise PeersLost("the group was aborted while it formed")
        return future.result()
