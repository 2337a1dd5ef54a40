"""What each rank spends its steps on: its own work, waiting for slower ranks, communicating; and its memory and energy.

With busy_r what rank r did since the last sum of the step before, without the time in sums, ranks wait for the last to arrive:

    wait_r = max(busy) - busy_r        communication_r = time in sums within the step - wait_r

All left that sum at about the same moment, so this needs no common clock. Communication that the backward pass hides is in
neither. Every rank hears the figures of all with the sum that each step ends with.
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
from trainwright.tasks.runs.artefacts import PlannedDevice
from trainwright.tasks.train.exchange.collective import Collective

_PAGE_BYTES = resource.getpagesize()


@dataclass(frozen=True)
class RankFigures:
    """A rank's step. `energy_j` is NaN where no meter counts the device's alone; it and communication are of the step before."""

    compute_s: float = 0.0
    busy_s: float = 0.0
    wait_s: float = 0.0
    communication_s: float = 0.0
    memory_bytes: float = 0.0
    energy_j: float = math.nan


_NAMES = [one.name for one in fields(RankFigures)]
WIDTH, _BUSY = len(_NAMES), _NAMES.index("busy_s")


class Figures:
    """A rank's own figures, step after step: `begin`, `arrive`, (the sum), `finish`."""

    def __init__(
        self, collective: Collective, device: torch.device, meter: EnergyMeter | None
    ) -> None:
        self._collective, self._device, self._meter = collective, device, meter
        self._left, self._left_wait_s = time.perf_counter(), collective.wait_s
        self._begin_wait_s = collective.wait_s
        self._counted_j = meter.read_j() if meter is not None else math.nan
        self.own = RankFigures()
        self._summed: Sequence[float] = list(vars(self.own).values())
        self._latest_s = 0.0

    @property
    def all(self) -> list[RankFigures]:
        """Those of all members, in the order of their ranks."""
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
        """A step begins."""
        self._begin_wait_s = self._collective.wait_s

    def arrive(self, compute_s: float) -> torch.Tensor:
        """The rank's own work is done; its part of the sum over ranks, in which each has its own place."""
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
        """All sums of the step are done."""
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
        except OSError:  # it can be read no longer: from now on there is none
            self._meter = None
            return math.nan
        return self._counted_j - before


def own_meter(
    planned: PlannedDevice, devices: Sequence[PlannedDevice], device: torch.device
) -> EnergyMeter | None:
    """What counts the energy of one device of a plan alone; None where nothing does.

    A GPU has a counter of its own. Those of a CPU are of the machine's sockets, so that a rank can have them only where it is the
    only one of its host; they count what else runs there, too.
    """
    alone = sum(one.host == planned.host for one in devices) == 1
    return meter_for(planned.type, uuid_of(device)) if planned.type != "cpu" or alone else None


def memory_bytes(device: torch.device) -> float:
    """What this process holds now: of the GPU's memory, or of the host's."""
    if device.type == "cuda":
        return float(torch.cuda.memory_reserved(device))
    return float(os.pread(_statm(os.getpid()), 100, 0).split()[1]) * _PAGE_BYTES


@functools.cache
def _statm(process: int) -> int:
    """Kept open: it is read at every step."""
    return os.open(f"/proc/{process}/statm", os.O_RDONLY | os.O_CLOEXEC)
