"""Times steps of many models in blocks, in random order, with a sentinel around each block."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from trainwright.estimator.measure.sentinel import Sentinel as Kernels
from trainwright.estimator.predict.machine_speed import Speed

BLOCK = 3
_LEAST_S = 0.1
_MOST_STEPS = 20
CLOCKS = ("wall-clock", "wall-clock at the calibrated speed", "thread-CPU")
"""Clocks for a step: wall-clock; wall-clock normalised to the speed at calibration; CPU."""


class Sentinel:
    """The current speed of the machine, relative to that of its calibration."""

    def __init__(self, calibrated: Speed) -> None:
        self.seen: list[Speed] = []
        self._kernels, self._calibrated = Kernels(), calibrated

    def __call__(self) -> Speed:
        """The current times of the kernels."""
        self.seen.append(self._kernels())
        return self.seen[-1]

    def normalised(
        self, seconds: float, flops: float, calls: float, before: Speed, after: Speed
    ) -> float:
        """Seconds normalised to the speed at calibration, of a step timed between two readings."""
        between = Speed.median([before, after])
        return seconds / between.slower(self._calibrated, seconds, flops, calls)

    def summary(self) -> str:
        """The machine's speed and its drift: (p90 - p10) / median of each kernel."""
        parts = []
        for name in ("compute_s", "memory_s", "calls_s"):
            seen = [getattr(one, name) for one in self.seen]
            tenths, middle = (
                statistics.quantiles(seen, n=10, method="inclusive"),
                statistics.median(seen),
            )
            slower = middle / getattr(self._calibrated, name)
            parts.append(
                f"{name.removesuffix('_s')} {slower:.2f}x its time in calibration, drift "
                f"{(tenths[-1] - tenths[0]) / middle:.0%}"
            )
        return "; ".join(parts)


@dataclass
class Timed:
    """A step and its measured seconds, by clock and round, in this process and in another one."""

    step: Callable[[], None]
    flops: float
    calls: float
    elsewhere: Callable[[], tuple[float, float]] | None = None
    rounds: dict[str, list[float]] = field(default_factory=lambda: {clock: [] for clock in CLOCKS})
    rounds_elsewhere: dict[str, list[float]] = field(
        default_factory=lambda: {clock: [] for clock in CLOCKS}
    )

    def seconds(self, clock: str) -> float:
        """The median over the rounds."""
        return statistics.median(self.rounds[clock])


def run_rounds(
    timed: Sequence[Timed], rounds: int, sentinel: Sentinel, say: Callable[[str], None]
) -> None:
    """Add `rounds` rounds over all steps, each in another order."""
    for number in range(rounds):
        order = list(timed)
        random.Random(f"{number} {len(timed[0].rounds[CLOCKS[0]])}").shuffle(order)
        before = sentinel()
        for place in range(0, len(order), BLOCK):
            block = order[place : place + BLOCK]
            here = [(one, one.rounds, partial(time_steps, one.step)) for one in block]
            there = [
                (one, one.rounds_elsewhere, one.elsewhere)
                for one in block
                if one.elsewhere is not None
            ]
            for where in (here, there):
                taken = [(one, rounds_s, run()) for one, rounds_s, run in where]
                after = sentinel()
                for one, rounds_s, (wall_s, cpu_s) in taken:
                    values = (
                        wall_s,
                        sentinel.normalised(wall_s, one.flops, one.calls, before, after),
                        cpu_s,
                    )
                    for clock, value in zip(CLOCKS, values, strict=True):
                        rounds_s[clock].append(value)
                before = after
        say(f"round {number + 1} of {rounds}")


def time_steps(step: Callable[[], None]) -> tuple[float, float]:
    """Wall-clock and CPU seconds of a step, the medians of several after one that warms the caches.

    CPU seconds are this thread's, or the whole process's with several threads.
    """
    cpu = time.thread_time if torch.get_num_threads() == 1 else time.process_time
    step()
    walls: list[float] = []
    cpus: list[float] = []
    while len(walls) < 3 or (sum(walls) < _LEAST_S and len(walls) < _MOST_STEPS):
        started, worked = time.perf_counter(), cpu()
        step()
        cpus.append(cpu() - worked)
        walls.append(time.perf_counter() - started)
    return statistics.median(walls), statistics.median(cpus)
