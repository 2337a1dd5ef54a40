"""Sentinel kernels: always the same work, to measure the machine's speed. Loads torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch  # noqa: TID253 - measuring runs in a separate process

from trainwright.estimator.measure.torch_device import CPU, TorchDevice
from trainwright.estimator.predict.machine_speed import Speed

Found = TypeVar("Found")


class Sentinel:
    """Three kernels on a device: a product, a sum and a chain of small calls.

    Each is repeated and the shortest time counts, because in the first repetitions the caches still
    hold the last network's data. The sum's arrays are in no cache; it takes longest, so it needs
    fewer repetitions.
    """

    def __init__(self, device: TorchDevice = CPU) -> None:
        where = device.torch
        self._finish = device.finish
        self._left, self._right = (torch.rand(160, 160, device=where) for _ in range(2))
        self._one, self._two, self._sum = (torch.rand(2_000_000, device=where) for _ in range(3))
        self._small = torch.rand(4, 4, requires_grad=True, device=where)
        self()

    def __call__(self) -> Speed:
        """The current speed."""
        return Speed(
            compute_s=self._shortest_s(self._multiply, 5),
            memory_s=self._shortest_s(self._add, 3),
            calls_s=self._shortest_s(self._chain, 5),
        )

    def _shortest_s(self, kernel: Callable[[], None], times: int) -> float:
        seen = []
        for _ in range(times):
            started = time.perf_counter()
            kernel()
            self._finish()
            seen.append(time.perf_counter() - started)
        return min(seen)

    def _multiply(self) -> None:
        for _ in range(3):
            _ = self._left @ self._right

    def _add(self) -> None:
        torch.add(self._one, self._two, out=self._sum)

    def _chain(self) -> None:
        for _ in range(30):
            self._small.view(16).view(4, 4).mul(2)


class BetweenSentinels:
    """Runs pieces of work, with the sentinel before and after each to measure the speed."""

    def __init__(self, sentinel: Sentinel) -> None:
        self._sentinel, self._before = sentinel, sentinel()

    def __call__(self, work: Callable[[], Found]) -> tuple[Found, Speed]:
        """The work's return value, and the machine's speed during it."""
        found, after = work(), self._sentinel()
        speed, self._before = Speed.median([self._before, after]), after
        return found, speed
