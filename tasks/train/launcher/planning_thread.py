"""Plans layouts in one thread, each once: those that are needed now before those planned ahead."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future
from typing import Generic, TypeVar

PlanKey = TypeVar("PlanKey", bound=Hashable)
Planned = TypeVar("Planned")


class PlanningThread(Generic[PlanKey, Planned]):
    """A future for each key. The thread runs while there is something to plan."""

    def __init__(self, plan: Callable[[PlanKey], Planned], name: str) -> None:
        self._plan, self._name = plan, name
        self._futures: dict[PlanKey, Future[Planned]] = {}
        self._needed: list[PlanKey] = []
        self._ahead: list[PlanKey] = []
        self._lock, self._runs = threading.Lock(), False

    def need(self, key: PlanKey) -> Future[Planned]:
        """What is planned for a key, next after what is planned already."""
        with self._lock:
            if key not in self._futures:
                self._futures[key] = Future()
                self._needed.append(key)
                self._begin()
            elif key in self._ahead:
                self._ahead.remove(key)
                self._needed.append(key)
            return self._futures[key]

    def plan_ahead(self, keys: Iterable[PlanKey]) -> None:
        """Plan for these while nothing is needed, instead of those that earlier calls left."""
        with self._lock:
            for key in self._ahead:
                del self._futures[key]
            self._ahead = [key for key in dict.fromkeys(keys) if key not in self._futures]
            self._futures |= {key: Future() for key in self._ahead}
            self._begin()

    def _begin(self) -> None:
        if not self._runs and (self._needed or self._ahead):
            self._runs = True
            threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._lock:
                waiting = self._needed or self._ahead
                if not waiting:
                    self._runs = False
                    return
                key = waiting.pop(0)
                future = self._futures[key]
            try:
                future.set_result(self._plan(key))
            except Exception as error:  # noqa: BLE001 - raised again by the future
                future.set_exception(error)
