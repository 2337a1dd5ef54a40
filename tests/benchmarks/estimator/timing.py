"""Times steps of many models in blocks, in random order, a sentinel kernel round every block."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

BLOCK = 6
_LEAST_S = 0.1
_MOST_STEPS = 20
CLOCKS = ("wall-clock", "wall-clock at the calibrated speed", "thread-CPU")
"""What is told of a step: its seconds; those at the machine's speed in calibration; those of the CPU."""


class Sentinel:
    """A kernel that is always the same: its time says how fast the machine is at the moment."""

    def __init__(self) -> None:
        self._left, self._right = torch.rand(256, 256), torch.rand(256, 256)
        self.seen: list[float] = []
        self._unit_s: float | None = None

    def __call__(self) -> float:
        """Seconds, the median of seven."""
        taken = []
        for _ in range(7):
            started = time.perf_counter()
            for _ in range(8):
                torch.mm(self._left, self._right)
            taken.append(time.perf_counter() - started)
        self.seen.append(statistics.median(taken))
        return self.seen[-1]

    def settle(self) -> None:
        """From here on, speeds are told by the median of what was seen so far: of the machine while it was calibrated."""
        self._unit_s = statistics.median(self.seen)
        self.seen.clear()

    def slower(self, seconds: float) -> float:
        """How much slower the machine was when the sentinel took so long. Raises ValueError before `settle`."""
        if self._unit_s is None:
            raise ValueError("sentinel: no speed to compare with; settle it first")
        return seconds / self._unit_s

    def drift(self) -> float:
        """The spread of what was seen since: (p90 - p10) / median."""
        tenths = statistics.quantiles(self.seen, n=10, method="inclusive")
        return (tenths[-1] - tenths[0]) / statistics.median(self.seen)


@dataclass
class Timed:
    """A step, and what was measured of it: seconds by clock, one value for each round."""

    step: Callable[[], None]
    rounds: dict[str, list[float]] = field(default_factory=lambda: {clock: [] for clock in CLOCKS})

    def seconds(self, clock: str) -> float:
        """The median over the rounds."""
        return statistics.median(self.rounds[clock])


def run_rounds(timed: Sequence[Timed], rounds: int, sentinel: Sentinel, say: Callable[[str], None]) -> None:
    """Add `rounds` rounds, each of every step in an order of its own."""
    for number in range(rounds):
        order = list(timed)
        random.Random(f"{number} {len(timed[0].rounds[CLOCKS[0]])}").shuffle(order)
        before = sentinel()
        for place in range(0, len(order), BLOCK):
            block = order[place : place + BLOCK]
            taken = [time_steps(one.step) for one in block]
            after = sentinel()
            for one, (wall_s, cpu_s) in zip(block, taken, strict=True):
                values = (wall_s, wall_s / sentinel.slower((before + after) / 2), cpu_s)
                for clock, value in zip(CLOCKS, values, strict=True):
                    one.rounds[clock].append(value)
            before = after
        say(f"round {number + 1} of {rounds}")


def time_steps(step: Callable[[], None]) -> tuple[float, float]:
    """Wall-clock and CPU seconds of a step, the medians of several after one that warms the caches.

    The CPU's are of this thread, or with more threads of all of the process.
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
