"""The peak of a stage's tensors in a step, simulated along its passes. Arithmetic.

What `estimator.memory.stage_simulation` says of each pass is put together in the order of the
schedule: parameters, optimizer state and gradients; the step's rows on the first and the last
stage; what each micro-batch in flight keeps; messages.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

from trainwright.estimator.devices import HOST_MEMORY_TYPES
from trainwright.estimator.memory.stage_simulation import (
    CUDA_BLOCK_BYTES,
    PassMemory,
    StageSimulation,
    peak_bytes,
)
from trainwright.estimator.structure import LayerFacts, RecordedStep, Unit
from trainwright.tasks.allocate.actions.schedules import DEFERRED_KINDS, passes_of
from trainwright.tasks.allocate.actions.stage_parts import layers_of_units
from trainwright.tasks.runs.artefacts.layout import StageSchedule


@dataclass(frozen=True)
class StageWorkload:
    """What a stage does in a step."""

    first: int
    """its first unit"""
    end: int
    schedule: StageSchedule
    stage: int
    stages: int
    """of its pipeline"""
    micro_batches: tuple[int, ...]
    """samples of each"""


class UnitParameters:
    """The trained parameters of units, tied ones in each unit that uses them."""

    def __init__(self, layers: Sequence[LayerFacts], units: Sequence[Unit]) -> None:
        self._bytes_of = {
            name: one.parameter_bytes * count / max(1, sum(one.parameters.values()))
            for one in layers
            for name, count in one.parameters.items()
        }
        self._names = [
            [*(name for one in own for name in one.parameters), *unit.tied]
            for own, unit in zip(layers_of_units(layers, units).values(), units, strict=True)
        ]
        self.largest = max(self._bytes_of.values(), default=0.0)
        """bytes of the largest one"""

    def of(self, first: int, end: int) -> dict[str, float]:
        """Bytes of each parameter that the units [first, end) use."""
        names = [name for own in self._names[first:end] for name in own]
        return {name: self._bytes_of.get(name, 0.0) for name in names}

    def size(self, first: int, end: int) -> float:
        """Bytes of all of them."""
        return sum(self.of(first, end).values())


class StagePeaks:
    """The stages of a recorded step."""

    def __init__(
        self,
        step: RecordedStep,
        layers: Sequence[LayerFacts],
        units: Sequence[Unit],
        tensors: int,
    ) -> None:
        """`tensors`: of a parameter's size that a rank holds, its gradient among them."""
        self._units, self._tensors = units, tensors
        self._by_unit = [tuple(own) for own in layers_of_units(layers, units).values()]
        self._parameters = UnitParameters(layers, units)
        self._simulation = lru_cache(maxsize=None)(
            lambda samples, block: StageSimulation(step, units, samples, block)
        )
        self._passes = lru_cache(maxsize=None)(self._pass_memory)

    def parameter_bytes(self, first: int, end: int) -> float:
        """Of the parameters that the units [first, end) use."""
        return self._parameters.size(first, end)

    def peak_bytes(
        self, what: StageWorkload, device_type: str, recomputed: Collection[str] = ()
    ) -> float:
        """The most bytes of tensors and of messages alive at once on a device of this type."""
        in_host = device_type in HOST_MEMORY_TYPES
        block = 1 if in_host else CUDA_BLOCK_BYTES
        later = what.schedule == "zero-bubble" and what.stages > 1
        by_size = {
            size: self._passes(size, block, what.first, what.end, tuple(recomputed), later)
            for size in {max(1, one) for one in what.micro_batches}
        }
        own = self._parameters.of(what.first, what.end)
        simulation = self._simulation(max(1, *what.micro_batches), block)
        rows = 0.0
        if what.first == 0 or what.end == len(self._units):
            rows = simulation.batch_bytes(sum(what.micro_batches))
        largest = self._parameters.largest
        share = max(own.values(), default=0.0) / largest if largest else 0.0
        return peak_bytes(
            passes_of(what.schedule, what.stages, what.stage, len(what.micro_batches)),
            [by_size[max(1, one)] for one in what.micro_batches],
            state_bytes=(self._tensors - 1) * sum(own.values()) + rows,
            update_bytes=share * simulation.update_bytes(),
            in_host=in_host,
        )

    def _pass_memory(
        self,
        samples: int,
        block: int,
        first: int,
        end: int,
        recomputed: tuple[str, ...],
        later: bool,
    ) -> PassMemory:
        products = {
            one.name: one.output_bytes(samples)
            for own in self._by_unit[first:end]
            for one in own
            if later and one.kind in DEFERRED_KINDS and not one.shared
        }
        return self._simulation(samples, block).passes(first, end, recomputed, products)
