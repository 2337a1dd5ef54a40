"""What kinds of devices need if some modules are recomputed. Arithmetic.

With P(b) the simulated peak of b samples and P_R(b) that with the modules R recomputed, F_R(b) the
seconds of their forward passes, and t(b), m(b) the plain step's time and memory:

    t_R(b) = t(b) + F_R(b)          m_R(b) = m(b) − h · (P(b) − P_R(b))

h is the resident memory of a byte that is held (`memory.step_memory`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from trainwright.estimator.curves import Affine, DeviceCurve, Knots, LayerCost, line_through
from trainwright.estimator.devices import HOST_MEMORY_TYPES
from trainwright.estimator.memory.recomputation import StepSimulation
from trainwright.estimator.memory.recompute_choice import RecomputeChoice
from trainwright.estimator.memory.recompute_names import covered
from trainwright.estimator.memory.step_memory import recomputed_safe_bytes
from trainwright.estimator.structure import RecordedStep, Unit

LIBRARY_BYTES = 90 * 2**20
"""What torch loads in a process to recompute (measured)."""


@dataclass(frozen=True)
class RecomputedShare:
    """What recomputing takes and saves in a step of some samples on a device."""

    names: tuple[str, ...]
    saved_bytes: float
    plain_bytes: float
    """the simulated peak without it"""
    seconds: float


class RecomputingCurves:
    """The curves of a step's devices with recomputation; simulations are kept."""

    def __init__(self, step: RecordedStep, units: Sequence[Unit] = ()) -> None:
        """`units`: the model's; without them, modules are recomputed one by one."""
        self._simulation = StepSimulation(step, 1)
        self._modules = {module for unit in units for module in unit.modules}
        self._choices: dict[int, RecomputeChoice] = {}
        self._too_many: dict[tuple[int, float], int] = {}
        """by curve and memory limit: the fewest samples that fit with no choice"""
        self._leanest: dict[int, tuple[str, ...]] = {}
        self._layers: dict[str, list[int]] = {}
        """by candidate: the layers that it recomputes"""

    def choice(self, batch_size: int) -> RecomputeChoice:
        """What may be recomputed in a step of so many samples."""
        if batch_size not in self._choices:
            self._choices[batch_size] = RecomputeChoice(
                self._simulation.at(batch_size), self._modules
            )
        return self._choices[batch_size]

    def names_for(
        self, curve: DeviceCurve, batch_size: int, limit_bytes: float, *, exact: bool
    ) -> tuple[str, ...]:
        """The cheapest modules with which a device's memory holds so many samples.

        If none suffice: those with which a step of the curve's largest batch takes least memory.
        `exact` as of `RecomputeChoice.cheapest`.
        """
        if curve.device_memory_bytes(batch_size) <= limit_bytes:
            return ()
        key = id(curve), limit_bytes
        if batch_size >= self._too_many.get(key, math.inf):
            return self.leanest(curve)
        choice = self.choice(batch_size)
        over = curve.device_memory_bytes(batch_size) + library_bytes(curve) - limit_bytes
        per_byte = -recomputed_safe_bytes(0.0, 1.0, 0.0)
        layers = [one.forward for one in curve.layer_seconds(batch_size)[0]]
        seconds = {
            name: sum(layers[place] for place in self._places(name, curve)) for name in choice.names
        }
        cap_bytes = choice.plain_bytes - over / per_byte
        found = choice.cheapest(cap_bytes, seconds, exact=exact)
        if found is None:
            self._too_many[key] = batch_size
            return self.leanest(curve)
        return found.names

    def _places(self, name: str, curve: DeviceCurve) -> list[int]:
        """The layers of a candidate, by place; all curves have the same."""
        if name not in self._layers:
            self._layers[name] = _places_of([name], curve)
        return self._layers[name]

    def leanest(self, curve: DeviceCurve) -> tuple[str, ...]:
        """The modules with which a step of the curve's largest batch takes the least memory."""
        assert curve.time_knots is not None
        largest = curve.time_knots.sizes[-1]
        if largest not in self._leanest:
            self._leanest[largest] = self.choice(largest).leanest().names
        return self._leanest[largest]

    def share(self, curve: DeviceCurve, names: Sequence[str], samples: int) -> RecomputedShare:
        """What these modules save and take in a pass of so many samples."""
        choice = self.choice(samples)
        saved = choice.plain_bytes - choice.peak_bytes(names)
        seconds = forward_s(curve, names, samples)
        return RecomputedShare(tuple(names), saved, choice.plain_bytes, seconds)

    def with_modules(self, curve: DeviceCurve, names: Sequence[str]) -> DeviceCurve:
        """The curve of a step in which these modules are recomputed."""
        knots = curve.time_knots
        if not names or knots is None:
            return curve
        expected, safe = [], []
        for size in knots.sizes:
            choice = self.choice(size)
            peak = choice.peak_bytes(names)
            expected.append(max(0.0, curve.memory_bytes(size) - (choice.plain_bytes - peak)))
            bound = recomputed_safe_bytes(curve.safe_memory_bytes(size), choice.plain_bytes, peak)
            safe.append(max(expected[-1], bound))
        return with_time(curve, names).model_copy(
            update={
                "memory_knots": Knots(sizes=knots.sizes, values=_rising(expected)),
                "safe_memory_knots": Knots(sizes=knots.sizes, values=_rising(safe)),
                "process_bytes": curve.process_bytes + library_bytes(curve),
            }
        )


def with_time(curve: DeviceCurve, names: Collection[str]) -> DeviceCurve:
    """The curve with the time of recomputing these modules, as a part of their backward passes."""
    knots = curve.time_knots
    if not names or knots is None:
        return curve
    again = covered(names, [one.name for one in curve.layers])
    times = [knots(size) + forward_s(curve, names, size) for size in knots.sizes]
    return curve.model_copy(
        update={
            "time_knots": Knots(sizes=knots.sizes, values=_rising(times)),
            "step_time_s": line_through(knots.sizes, times),
            "layers": tuple(_again(one) if one.name in again else one for one in curve.layers),
        }
    )


def library_bytes(curve: DeviceCurve) -> float:
    """Memory that recomputing takes in a rank's process, if that counts for the device."""
    return LIBRARY_BYTES if curve.device_type in HOST_MEMORY_TYPES else 0.0


def forward_s(curve: DeviceCurve, names: Collection[str], samples: int) -> float:
    """Seconds of the forward passes of these modules."""
    layers, _ = curve.layer_seconds(samples)
    return sum(layers[place].forward for place in _places_of(names, curve))


def _places_of(names: Collection[str], curve: DeviceCurve) -> list[int]:
    again = covered(names, [one.name for one in curve.layers])
    return [place for place, one in enumerate(curve.layers) if one.name in again]


def _again(cost: LayerCost) -> LayerCost:
    first, second = cost.forward, cost.input_gradient
    both = Affine(fixed=first.fixed + second.fixed, per_sample=first.per_sample + second.per_sample)
    return cost.model_copy(update={"input_gradient": both})


def _rising(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(itertools.accumulate(values, max))
