"""The memory of a stage on a device, from that of the whole model's step. Arithmetic.

The peak of a stage's tensors is simulated along its passes (`stage_peaks`). The safety of the whole
step's bound, such as for free memory of the heap, applies to it.

The search of cuts takes a simpler figure: a stage keeps the parameters, gradients and optimizer
tensors of its units, and for each micro-batch in flight what their backward passes need; what else
a step of the whole model takes at its peak, such as workspaces, is assumed for every stage. That is
also the figure if the estimate does not know the storages of a step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from trainwright.estimator.structure import LayerFacts
from trainwright.tasks.allocate.layouts.memory import state_tensors
from trainwright.tasks.allocate.pipelines.stage_copies import StageCopies
from trainwright.tasks.allocate.pipelines.stage_peaks import StagePeaks, StageWorkload
from trainwright.tasks.allocate.plan.cost import CostModel
from trainwright.tasks.allocate.plan.topology import machine_of
from trainwright.tasks.allocate.recompute.recomputing_curves import library_bytes
from trainwright.tasks.spec.pool import Device


@dataclass(frozen=True)
class StageTensors:
    """The tensors of a stage."""

    workload: StageWorkload
    kept_bytes: float
    """parameters with their tensors, and what is kept of micro-batches, as the search adds them"""
    freed_bytes: float
    """of these, what recomputing saves"""
    recomputed: Collection[str] = ()


class StageMemory:
    """The memory of some devices for stages of a model."""

    def __init__(
        self,
        model: CostModel,
        layers: Sequence[LayerFacts],
        devices: Sequence[Device],
        spared_bytes: Mapping[str, float] | None = None,
    ) -> None:
        """`spared_bytes`: what the search leaves free on a device, by its id."""
        self._spared = [(spared_bytes or {}).get(device.id, 0.0) for device in devices]
        self.tensors = state_tensors(model.job.train.optimizer)
        self._layers = layers
        sum_items = 2 if model.job.train.precision == "bf16" else 1  # bf16 is summed in fp32
        self.copies = StageCopies(
            model.estimate, layers, model.estimate.units, self.tensors, sum_items
        )
        step, units = model.estimate.step, model.estimate.units
        self._peaks = None if step is None else StagePeaks(step, layers, units, self.tensors)
        self._kinds = [model.kind(device) for device in devices]
        shared = Counter(
            machine_of(device)
            for device, kind in zip(devices, self._kinds, strict=True)
            if kind.shares_memory
        )
        self._sharing = [
            shared[machine_of(device)] if kind.shares_memory else 1
            for device, kind in zip(devices, self._kinds, strict=True)
        ]
        self._limits = [
            None
            if kind.curve.memory_limit_bytes is None
            else kind.curve.memory_limit_bytes / sharing
            for kind, sharing in zip(self._kinds, self._sharing, strict=True)
        ]
        """bytes of each device; ranks that share a machine's memory divide it evenly"""

    def limit_bytes(self, device: int) -> float | None:
        """The memory of a device; None: not known."""
        return self._limits[device]

    def sharing(self, device: int) -> int:
        """How many ranks share the memory of a device's machine."""
        return self._sharing[device]

    def rooms(self, micro_batch: int, more: float = 1.0) -> list[float]:
        """Bytes of each device for the tensors of a stage, if memories are `more` times as large.

        Below zero if the process and the rest of a step take more than there is.
        """
        found = []
        for number, limit in enumerate(self._limits):
            if limit is None:
                found.append(float("inf"))
                continue
            fixed, safety, rest = self._besides(number, micro_batch)
            found.append((more * limit - fixed) / safety - rest - self._spared[number])
        return found

    def searched_tensors(self, micro_batch: int) -> float:
        """Of a parameter's size, as the search of cuts counts them on any device.

        Devices that need copies for checkpoints too may lack memory even so: `need` says.
        """
        return self.tensors + min(
            self.copies.of_parameters(one.curve) / self._besides(number, micro_batch)[1]
            for number, one in enumerate(self._kinds)
        )

    def may_lack(self, batch: int) -> bool:
        """Whether some device could not hold the whole model with all samples of a step."""
        tensors = self.searched_tensors(batch)
        size = sum(tensors * one.parameter_bytes + one.kept_bytes(batch) for one in self._layers)
        return min(self.rooms(batch)) < size

    def need(self, device: int, stage: StageTensors, more_bytes: float = 0.0) -> float:
        """Bytes of a device with a stage; `more_bytes` of tensors beside it."""
        curve = self._kinds[device].curve
        fixed, safety, rest = self._besides(device, max(stage.workload.micro_batches))
        if self._peaks is None:
            peak = rest + stage.kept_bytes - stage.freed_bytes
        else:
            peak = self._peaks.peak_bytes(stage.workload, curve.device_type, stage.recomputed)
        loads = bool(stage.recomputed) and not self.copies.is_divided
        libraries = library_bytes(curve) if loads else 0.0
        first, end = stage.workload.first, stage.workload.end
        training = libraries + safety * (peak + more_bytes)
        training += self.copies.lasting_bytes(curve, first, end)
        return fixed + max(training, self.copies.building_bytes(curve, first, end))

    def over_bytes(self, device: int, stage: StageTensors) -> float:
        """By how many bytes of tensors a stage exceeds a device's memory; negative: it does not."""
        limit = self._limits[device]
        if limit is None:
            return -math.inf
        _, safety, _ = self._besides(device, max(stage.workload.micro_batches))
        return (self.need(device, stage) - limit) / safety

    def process_bytes(self, device: int) -> float:
        """Bytes of a device's process without any stage."""
        return self.copies.process_bytes(self._kinds[device].curve)

    def _besides(self, device: int, micro_batch: int) -> tuple[float, float, float]:
        """Bytes of the process, the safety of the step's bound, the rest of the step's peak."""
        curve, size = self._kinds[device].curve, max(1, micro_batch)
        peak = curve.memory_bytes(size)
        known = sum(
            self.tensors * one.parameter_bytes + one.kept_bytes(size) for one in self._layers
        )
        safety = curve.safe_memory_bytes(size) / peak if peak > 0 else 1.0
        return self.copies.process_bytes(curve), safety, max(0.0, peak - known)
