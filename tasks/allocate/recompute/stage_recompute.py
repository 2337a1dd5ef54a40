"""What a stage of a pipeline recomputes, so that its micro-batches in flight fit into memory.

With x_i = 1 if module or run i is recomputed, s_i the bytes that it then keeps less of a
micro-batch, c_i the seconds of its forward pass, and f micro-batches in flight, the stage needs

    state + f · (kept − Σ s_i x_i) + max s_i x_i

since what is recomputed is made again one by one. The s_i come from simulations of the step with
only i recomputed. The least Σ c_i x_i within the memory is a knapsack, which HiGHS solves exactly.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from trainwright.estimator.curves import DeviceCurve
from trainwright.estimator.memory.recompute_candidates import exclusive
from trainwright.estimator.memory.recompute_names import covered, ends_of, is_inside
from trainwright.estimator.memory.solver import SLOPE, solved
from trainwright.estimator.structure import LayerFacts, Unit
from trainwright.tasks.allocate.recompute.recomputing_curves import RecomputingCurves, forward_s

_LEAST_SHARE = 1e-3
"""Candidates that save less than this share of what all candidates save are left out."""
_NODES = 20


@dataclass(frozen=True)
class RecomputedStage:
    """What a stage recomputes."""

    names: tuple[str, ...]
    saved_bytes: float
    """of each micro-batch in flight"""
    again_bytes: float
    """made again at once"""
    seconds: float
    """for each micro-batch"""


class _SavedByName(NamedTuple):
    name: str
    layers: frozenset[str]
    saved_bytes: float


class StageRecompute:
    """The choices for stages of a model."""

    def __init__(
        self, curves: RecomputingCurves, layers: Sequence[LayerFacts], units: Sequence[Unit]
    ) -> None:
        self._curves = curves
        self._order = [one.name for one in layers]
        self._called = {module for unit in units for module in unit.modules}
        self._known: dict[int, list[_SavedByName]] = {}

    def cheapest(
        self,
        curve: DeviceCurve,
        samples: int,
        layers: Collection[str],
        flight: int,
        over_bytes: float,
        *,
        apart: Collection[str] = (),
    ) -> RecomputedStage | None:
        """What takes least time and saves `over_bytes` on a device; None: nothing does.

        The stage has these `layers`, and `flight` micro-batches of so many `samples`. None of the
        layers `apart` is recomputed.
        """
        return self._chosen(curve, samples, layers, flight, apart, over_bytes)

    def leanest(
        self,
        curve: DeviceCurve,
        samples: int,
        layers: Collection[str],
        flight: int,
        *,
        apart: Collection[str] = (),
    ) -> RecomputedStage | None:
        """What saves most; None: nothing can be recomputed."""
        return self._chosen(curve, samples, layers, flight, apart, None)

    def _chosen(
        self,
        curve: DeviceCurve,
        samples: int,
        layers: Collection[str],
        flight: int,
        apart: Collection[str],
        over_bytes: float | None,
    ) -> RecomputedStage | None:
        import numpy as np

        own, no = set(layers), set(apart)
        some = [
            one for one in self._candidates(samples) if one.layers <= own and not one.layers & no
        ]
        if not some:
            return None
        seconds = np.array([forward_s(curve, [one.name], samples) for one in some])
        saved = np.array([one.saved_bytes for one in some])
        chosen = self._solved(samples, some, seconds, saved, flight, over_bytes)
        if not chosen:
            return None
        names = self._curves.choice(samples).in_order([some[one].name for one in chosen])
        return RecomputedStage(
            names,
            float(saved[chosen].sum()),
            float(saved[chosen].max()),
            float(seconds[chosen].sum()),
        )

    def _solved(
        self,
        samples: int,
        some: Sequence[_SavedByName],
        seconds: Any,
        saved: Any,
        flight: int,
        over_bytes: float | None,
    ) -> list[int]:
        """The candidates of the best choice; the last variable is what is made again at once."""
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint

        count, scale = len(some), float(saved.sum())
        gains = saved / scale
        rows = [np.append(row, -1.0) for row in np.diag(gains)]
        limits = [0.0] * count
        for own in exclusive(self._curves.choice(samples).simulation, [one.name for one in some]):
            row = np.zeros(count + 1)
            row[own] = 1.0
            rows.append(row)
            limits.append(1.0)
        if over_bytes is None:
            costs = np.append(-flight * gains, 1.0)
        else:
            costs = seconds / max(float(seconds.max()), 1e-30) + 1e-6
            costs = np.append(costs * np.linspace(1.0, 1.0 + SLOPE, count), 0.0)
            rows.append(np.append(-flight * gains, 1.0))
            limits.append(-over_bytes / scale)
        x = solved(
            costs,
            np.array([1] * count + [0]),
            Bounds(np.zeros(count + 1), np.array([1.0] * count + [np.inf])),
            [LinearConstraint(np.array(rows), -np.inf, np.array(limits))],
            _NODES,
        )
        return [] if x is None else [one for one in range(count) if x[one] > 0.5]

    def _candidates(self, samples: int) -> list[_SavedByName]:
        """What can be recomputed for micro-batches of so many samples."""
        if samples not in self._known:
            choice = self._curves.choice(samples)
            found = [
                _SavedByName(
                    name, frozenset(covered([name], self._order)), choice.saved_bytes(name)
                )
                for name in choice.names
                if all(
                    any(is_inside(module, end) for module in self._called) for end in ends_of(name)
                )
            ]
            least = _LEAST_SHARE * sum(one.saved_bytes for one in found)
            self._known[samples] = [one for one in found if one.saved_bytes > least and one.layers]
        return self._known[samples]
