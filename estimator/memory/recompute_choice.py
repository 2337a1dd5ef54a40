"""Chooses the modules to recompute, so that a step's simulated peak is within a cap.

With x_i = 1 if module i is recomputed (0 otherwise), c_i the seconds of its forward pass, and the
step cut into segments where a module's passes begin or end, the peak of segment s is at most

    P_s(x) = B_s + Σ_{i runs in s} (O_is − B_s) x_i + Σ_{i does not} D_is x_i

B: the peak without recomputation; O: the peak if only i is recomputed; D: by how much the live
bytes of the segment change, at most. All of them come from simulations, one for each module
(`recomputation`). What two recomputed modules both keep counts twice, so P is an upper bound. The
least Σ c_i x_i with P_s(x) <= cap, and no module inside another one that is chosen, is a small
integer program, which HiGHS solves exactly. Loads no torch.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainwright.estimator.memory.recomputation import StepSimulation
from trainwright.estimator.memory.recompute_candidates import exclusive, runs, worthwhile
from trainwright.estimator.memory.solver import SLOPE, greedy, solved

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MOST_MODULES, _MOST_RUNS = 128, 128
"""Candidates."""
_LEAST_GAIN = 0.002
"""Modules that keep less than this share of all that is kept are not worth recomputing."""
_NODES, _NODES_ALONE = 1, 200
"""Limits of the search, with and without runs: further nodes only prove that a choice is best."""
_TOLERANCE = 2e-6
"""What HiGHS may exceed a constraint by, relative to the plain peak, is kept free."""


@dataclass(frozen=True)
class ChosenModules:
    """Modules to recompute, and the simulated peak of a step then."""

    names: tuple[str, ...]
    peak_bytes: float


class RecomputeChoice:
    """The modules of a recorded step that may be recomputed, at a batch size."""

    def __init__(self, simulation: StepSimulation, modules: Collection[str] = ()) -> None:
        """`modules`: as of `recompute_candidates.runs`; empty: there are no runs."""
        self._modules, self._alone = modules, 0
        self.simulation = simulation
        self.plain_bytes = self.simulation.peak_bytes()
        """the peak without recomputation"""

    @functools.cached_property
    def names(self) -> list[str]:
        """The candidates: modules in the order in which they run, then runs of them."""
        alone = worthwhile(self.simulation, _LEAST_GAIN)[:_MOST_MODULES]
        self._alone = len(alone)
        return [*alone, *runs(self.simulation, self._modules, _MOST_RUNS)]

    def cheapest(
        self, cap_bytes: float, seconds: Mapping[str, float], *, exact: bool = True
    ) -> ChosenModules | None:
        """The modules with the least seconds whose recomputation keeps the peak within the cap.

        `seconds`: of each candidate's forward pass. Not `exact`: chosen greedily, which is faster,
        if that finds a choice. None: no choice was found.
        """
        import numpy as np

        if self.plain_bytes <= cap_bytes:
            return ChosenModules((), self.plain_bytes)
        if not self.names:
            return None
        costs = np.array([max(0.0, seconds[name]) for name in self.names])
        costs = costs / max(costs.max(), 1e-30) + 1e-6  # what costs nothing gains something
        costs *= np.linspace(1.0, 1.0 + SLOPE, len(costs))
        scale = max(self.plain_bytes, 1.0)
        rows, peaks = self._segments
        limits = (cap_bytes - peaks) / scale - _TOLERANCE
        chosen = None if exact else greedy(costs, rows / scale, limits, self._exclusive)
        if chosen is None:
            chosen = self._solved(costs, rows / scale, limits)
        if chosen is None:
            chosen = self._solved(costs, rows / scale, limits, alone=True)
        if chosen is None:
            return None
        found = self._simulated(chosen)
        return found if found.peak_bytes <= cap_bytes else None

    def leanest(self) -> ChosenModules:
        """The modules whose recomputation makes the peak smallest."""
        import numpy as np

        if not self.names:
            return ChosenModules((), self.plain_bytes)
        scale = max(self.plain_bytes, 1.0)
        segments, peaks = self._segments
        rows = np.hstack([segments / scale, -np.ones((len(segments), 1))])
        costs = np.array([*[1e-6] * len(self.names), 1.0])
        chosen = self._solved(costs, rows, -peaks / scale)
        found = [ChosenModules((), self.plain_bytes)]
        if chosen is not None:
            found.append(self._simulated(chosen))
        return min(found, key=lambda one: one.peak_bytes)

    def saved_bytes(self, name: str) -> float:
        """What is kept less between forward and backward pass if this is recomputed."""
        return self.simulation.kept_bytes() - self.simulation.kept_bytes([name])

    def in_order(self, names: Sequence[str]) -> tuple[str, ...]:
        """The names in the order in which they first run."""
        return self.simulation.in_order(names)

    def peak_bytes(self, names: Sequence[str]) -> float:
        """The simulated peak if these modules are recomputed."""
        return self.simulation.peak_bytes(names)

    def _simulated(self, chosen: Sequence[int]) -> ChosenModules:
        names = self.simulation.in_order([self.names[one] for one in chosen])
        return ChosenModules(names, self.simulation.peak_bytes(names))

    def _solved(
        self, costs: Any, rows: Any, limits: Any, *, alone: bool = False
    ) -> list[int] | None:
        """The candidates that an optimal solution chooses; a last variable is not one of them.

        None: none was found within the limit on nodes. `alone`: without runs of modules.
        """
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint

        count, width = len(self.names), len(costs)
        some = self._exclusive
        once = np.zeros((len(some), width))
        for place, own in enumerate(some):
            once[place, own] = 1.0
        constraints = [LinearConstraint(rows, -np.inf, limits)]
        if some:
            constraints.append(LinearConstraint(once, -np.inf, 1.0))
        whole = np.array([1] * count + [0] * (width - count))
        most = np.array([1.0] * count + [np.inf] * (width - count))
        if alone:
            most[self._alone : count] = 0.0
        bounds = Bounds(np.zeros(width), most)
        x = solved(costs, whole, bounds, constraints, _NODES if not alone else _NODES_ALONE)
        return None if x is None else [one for one in range(count) if x[one] > 0.5]

    @functools.cached_property
    def _exclusive(self) -> list[list[int]]:
        """Sets of candidates of which only one may be chosen."""
        return exclusive(self.simulation, self.names)

    @functools.cached_property
    def _segments(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """P: by segment, what each candidate changes, and the peak without recomputation."""
        import numpy as np

        simulation, names = self.simulation, self.names
        plain = simulation.live_bytes()
        spans = [simulation.spans(name) for name in names]
        first, end = simulation.step_places
        edges = {first, *(edge for some in spans for span in some for edge in span)}
        cuts = np.array(sorted(edge for edge in edges if first <= edge < end), dtype=np.int64)
        base = plain.most_between(cuts)
        places = np.arange(first, end)
        before = plain.at(places)
        begins = np.searchsorted(places, cuts)
        matrix = np.zeros((len(cuts), len(names)))
        for column, (name, some) in enumerate(zip(names, spans, strict=True)):
            live = simulation.live_bytes([name])
            own = np.zeros(len(cuts), dtype=bool)
            for begin, ending in some:
                own |= (cuts >= begin) & (cuts < ending)
            change = np.maximum.reduceat(live.at(places) - before, begins)
            matrix[:, column] = np.where(own, live.most_between(cuts) - base, change)
        shown = np.unique(np.hstack([matrix, base[:, None]]), axis=0)
        return shown[:, :-1], shown[:, -1]
