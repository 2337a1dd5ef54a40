"""Splits each rank's step time into compute, waiting and communication; adds memory and energy.

busy_r is rank r's time since the last sum of the previous step, without the time spent in sums.
All ranks left that sum at about the same moment, so no common clock is needed. In the next sum,
they wait for the last rank:

    wait_r = max(busy) - busy_r        communication_r = time in sums within the step - wait_r

Communication that overlaps with the backward pass is in neither. The sum at the end of each step
also gives every rank the figures of all.
"""

from __future__ import annotations

import functools
import math
import os
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch  # noqa: TID253 - only ranks import this

from trainwright.estimator.measure.energy_meter import EnergyMeter, meter_for
from trainwright.estimator.measure.power import uuid_of
from trainwright.tasks.runs.artefacts.plan import PlannedDevice
from trainwright.tasks.train.exchange.collective import Collective

_PAGE_BYTES = resource.getpagesize()


@dataclass(frozen=True)
class RankFigures:
    """One rank's figures of a step.

    `energy_j` is NaN if no meter measures this device alone. In the figures of other ranks,
    `energy_j` and `communication_s` are those of the previous step.
    """

    compute_s: float = 0.0
    busy_s: float = 0.0
    wait_s: float = 0.0
    communication_s: float = 0.0
    memory_bytes: float = 0.0
    energy_j: float = math.nan


_NAMES = [one.name for one in fields(RankFigures)]
WIDTH, _BUSY = len(_NAMES), _NAMES.index("busy_s")


class Figures:
    """Measures a rank's steps: call `begin`, `arrive`, sum over ranks, `finish`."""

    def __init__(
        self, collective: Collective, device: torch.device, meter: EnergyMeter | None
    ) -> None:
        self._collective, self._device, self._meter = collective, device, meter
        # When the last sum of the previous step ended, and `wait_s` then.
        self._left, self._left_wait_s = time.perf_counter(), collective.wait_s
        self._begin_wait_s = collective.wait_s
        self._counted_j = meter.read_j() if meter is not None else math.nan
        self.own = RankFigures()
        self._summed: Sequence[float] = list(vars(self.own).values())
        self._latest_s = 0.0

    @property
    def all(self) -> list[RankFigures]:
        """The figures of all members, by rank."""
        found = []
        for rank, at in enumerate(range(0, len(self._summed), WIDTH)):
            one = RankFigures(*self._summed[at : at + WIDTH])
            found.append(
                self.own
                if rank == self._collective.rank
                else replace(one, wait_s=self._latest_s - one.busy_s)
            )
        return found

    def begin(self) -> None:
        """Start a step."""
        self._begin_wait_s = self._collective.wait_s

    def arrive(self, compute_s: float) -> torch.Tensor:
        """The rank's compute is done: return its part of the sum, zero except at its own index."""
        now, waited, before = time.perf_counter(), self._collective.wait_s, self.own
        busy_s = (now - self._left) - (waited - self._left_wait_s)
        self.own = RankFigures(
            compute_s,
            busy_s,
            before.wait_s,
            before.communication_s,
            memory_bytes(self._device),
            before.energy_j,
        )
        part = [0.0] * (self._collective.size * WIDTH)
        part[self._collective.rank * WIDTH : (self._collective.rank + 1) * WIDTH] = vars(
            self.own
        ).values()
        return torch.tensor(part, dtype=torch.float64)

    def finish(self, summed: Sequence[float]) -> None:
        """All sums of the step are complete; `summed` holds the figures of all ranks."""
        self._left, self._left_wait_s = time.perf_counter(), self._collective.wait_s
        self._summed, own = summed, self.own
        self._latest_s = max(summed[_BUSY::WIDTH])
        in_sums_s = self._left_wait_s - self._begin_wait_s
        wait_s = min(self._latest_s - own.busy_s, in_sums_s)
        self.own = RankFigures(
            own.compute_s,
            own.busy_s,
            wait_s,
            in_sums_s - wait_s,
            own.memory_bytes,
            self._energy_since_last_j(),
        )

    def _energy_since_last_j(self) -> float:
        if self._meter is None:
            return math.nan
        try:
            before, self._counted_j = self._counted_j, self._meter.read_j()
        except OSError:  # the meter is gone: record no energy from now on
            self._meter = None
            return math.nan
        return self._counted_j - before


def own_meter(
    planned: PlannedDevice, devices: Sequence[PlannedDevice], device: torch.device
) -> EnergyMeter | None:
    """The energy meter of one device of a plan; None if no meter measures only this device.

    Each GPU has its own counter. CPU counters cover whole sockets, including other processes, so
    a CPU rank gets one only if it is the only rank on its host.
    """
    single = sum(one.host == planned.host for one in devices) == 1
    return meter_for(planned.type, uuid_of(device)) if planned.type != "cpu" or single else None


def memory_bytes(device: torch.device) -> float:
    """The memory that this process holds now, on the GPU or on the host."""
    if device.type == "cuda":
        return float(torch.cuda.memory_reserved(device))
    return float(os.pread(_statm(os.getpid()), 100, 0).split()[1]) * _PAGE_BYTES


@functools.cache
def _statm(process: int) -> int:
    """A descriptor that stays open, because it is read at every step."""
    return os.open(f"/proc/{process}/statm", os.O_RDONLY | os.O_CLOEXEC)
