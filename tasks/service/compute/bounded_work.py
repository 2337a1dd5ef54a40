"""Bounds work: some requests run, some wait, the service refuses the rest. Also the cache.

Equal requests share one piece of work, which ends when its last caller has gone.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from trainwright.tasks.service.limits import TooBusy


def content_key(*parts: str | bytes) -> str:
    """SHA-256 over parts and their lengths, so different lists have different keys."""
    whole = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        whole.update(f"{len(data)}\0".encode() + data)
    return whole.hexdigest()


class Cache:
    """Answers by key, up to `max_bytes` in total. Drops the least recently used first."""

    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes, self._clock = max_bytes, clock
        self._kept: OrderedDict[str, tuple[bytes, float]] = OrderedDict()
        self.size_bytes = 0

    def get(self, key: str) -> bytes | None:
        """The answer, if it is cached and not expired."""
        found = self._kept.get(key)
        if found is None:
            return None
        if self._clock() >= found[1]:
            self._drop(key)
            return None
        self._kept.move_to_end(key)
        return found[0]

    def put(self, key: str, answer: bytes, lifetime_s: float) -> None:
        """Cache an answer for `lifetime_s`, unless it is larger than the whole cache."""
        if key in self._kept:
            self._drop(key)
        if len(answer) > self._max_bytes:
            return
        self._kept[key] = (answer, self._clock() + lifetime_s)
        self.size_bytes += len(answer)
        while self.size_bytes > self._max_bytes:
            self._drop(next(iter(self._kept)))

    def _drop(self, key: str) -> None:
        self.size_bytes -= len(self._kept.pop(key)[0])


@dataclass
class _Flight:
    task: asyncio.Task[bytes]
    waiting: int = 0


class BoundedWork:
    """Runs work within bounds, in one event loop."""

    def __init__(self, at_once: int, waiting: int) -> None:
        self._slots = asyncio.Semaphore(at_once)
        self._most = at_once + waiting
        self._flights: dict[str, _Flight] = {}

    async def do(self, key: str, work: Callable[[], Awaitable[bytes]]) -> bytes:
        """The answer of `work`, shared by concurrent callers with the same key. Raises TooBusy."""
        flight = self._flights.get(key)
        if flight is None:
            if len(self._flights) >= self._most:
                raise TooBusy(
                    f"{self._most} requests are running or waiting; try again in a second"
                )
            flight = self._flights[key] = _Flight(asyncio.create_task(self._run(work)))
            flight.task.add_done_callback(lambda _: self._ended(key, flight))
        flight.waiting += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiting -= 1
            if not flight.waiting and not flight.task.done():
                self._ended(key, flight)
                flight.task.cancel()

    async def _run(self, work: Callable[[], Awaitable[bytes]]) -> bytes:
        async with self._slots:
            return await work()

    def _ended(self, key: str, flight: _Flight) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]
        if flight.task.done() and not flight.task.cancelled():
            flight.task.exception()  # mark as seen, or asyncio logs it
