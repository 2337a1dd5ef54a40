"""What a rank of a pipeline needs besides its step: copies of its own part of the state.

It is the sums of its gradients and, on devices that compute in the host's memory, two copies for
checkpoints of what it holds: ranks write their own tensors, and two checkpoints may be pending. A
small checkpoint is put together and written by one rank. While the rank builds its part of the
model, it has its own parameters, and makes one tensor at a time.

A model of which ranks can't build parts (`Estimate.builds_parts`) takes each of them the whole, as
data parallel does. Arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainwright.estimator.curves import DeviceCurve
from trainwright.estimator.devices import HOST_MEMORY_TYPES
from trainwright.estimator.memory.step_memory import SHARDED_ABOVE_BYTES
from trainwright.estimator.structure import LayerFacts, Unit
from trainwright.tasks.allocate.pipelines.stage_peaks import UnitParameters
from trainwright.tasks.allocate.recompute.recomputing_curves import library_bytes
from trainwright.tasks.runs.artefacts.estimate import Estimate

CHECKPOINTS = 2
"""How many may be pending, each with a copy of the state."""
_MADE_AT_ONCE = 2
"""Tensors in memory while one is made, as if it were computed from another."""


class StageCopies:
    """The memory of stages besides their steps. `tensors`: of a parameter's size that a rank holds.

    `sum_items`: the size of a number in a sum of gradients, over that of a parameter's number.
    """

    def __init__(
        self,
        estimate: Estimate,
        layers: Sequence[LayerFacts],
        units: Sequence[Unit],
        tensors: int,
        sum_items: int,
    ) -> None:
        self.parameters = UnitParameters(layers, units)
        self._tensors, self._sum_items = tensors, sum_items
        trained = sum(one.parameter_bytes for one in layers)
        parameters = estimate.gradient_bytes / sum_items
        # `kept_bytes` of a curve: sums of gradients, and two copies of the state.
        states = [
            (one.kept_bytes - parameters) / CHECKPOINTS
            for one in estimate.curves
            if one.device_type in HOST_MEMORY_TYPES
        ]
        self.other_bytes = max(0.0, max(states, default=0.0) - (tensors - 1) * trained)
        """parameters that are not trained, and buffers: each stage is charged all of them"""
        state = (tensors - 1) * trained + self.other_bytes
        self.is_divided = estimate.builds_parts and state > SHARDED_ABOVE_BYTES
        """whether a rank needs memory for its own part of the state only"""

    def process_bytes(self, curve: DeviceCurve) -> float:
        """Of a rank before it has its part of the model; it has loaded what cuts the model."""
        if not self.is_divided:
            return curve.process_bytes
        return curve.process_bytes - curve.kept_bytes + library_bytes(curve)

    def of_parameters(self, curve: DeviceCurve) -> int:
        """How many times the bytes of its parameters a stage needs besides its step."""
        if not self.is_divided:
            return 0
        copies = CHECKPOINTS if curve.device_type in HOST_MEMORY_TYPES else 0
        return self._sum_items + copies * (self._tensors - 1)

    def lasting_bytes(self, curve: DeviceCurve, first: int, end: int) -> float:
        """What the stage with the units [first, end) needs besides its step and process."""
        if not self.is_divided:
            return 0.0
        copies = CHECKPOINTS if curve.device_type in HOST_MEMORY_TYPES else 0
        own = self.parameters.size(first, end)
        return self.of_parameters(curve) * own + (1 + copies) * self.other_bytes

    def gathered_bytes(self, layers: Sequence[LayerFacts]) -> float:
        """What a rank that holds rows of these layers needs to write all rows to a checkpoint."""
        if not self.is_divided:
            return 0.0
        return (self._tensors - 1) * sum(one.parameter_bytes for one in layers)

    def building_bytes(self, curve: DeviceCurve, first: int, end: int) -> float:
        """The peak in the device's memory, without the process, until the stage's first step."""
        if not self.is_divided or curve.device_type not in HOST_MEMORY_TYPES:
            return 0.0
        own = self.parameters.size(first, end)
        return own + self.other_bytes + _MADE_AT_ONCE * self.parameters.largest
