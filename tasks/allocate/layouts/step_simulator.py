"""Plays the actions of all ranks against predicted times: step time, waits and bytes of each.

A rank computes one action after another. A transfer begins when the last of its ranks has reached
it, and when the links of its ranks have ended the transfers before it. The small sum at the end of
a step (`agree`) overtakes those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainwright.estimator.curves import DeviceCurve
from trainwright.estimator.structure import LayerFacts
from trainwright.tasks.allocate.layouts.actions import COMPUTE, TRANSFERS, Action, actions_of
from trainwright.tasks.allocate.layouts.network import RankNetwork
from trainwright.tasks.allocate.layouts.transfer_sizes import Moved, TransferSizes
from trainwright.tasks.runs.artefacts.layout import Layout


@dataclass(frozen=True)
class Span:
    """When a rank did an action, in seconds since the step began."""

    action: Action
    begin_s: float
    end_s: float


@dataclass
class SimulatedStep:
    """A step as predicted."""

    step_s: float
    events: list[tuple[Action, Any, Any]]
    """action, and arrays over ranks of its begin and end; not a number: the rank does not do it"""
    sent_bytes: list[float]
    """by rank"""
    on_wire: dict[str, tuple[float, float]] = field(default_factory=dict)
    """begin and end of each transfer, by name"""

    def spans(self, rank: int) -> list[Span]:
        """What a rank does; of started transfers, when they are on the wire."""
        return [
            Span(action, float(begins[rank]), float(ends[rank]))
            for action, begins, ends in self.events
            if begins[rank] == begins[rank]
        ]

    def compute_s(self) -> list[float]:
        """Seconds that each rank computes."""
        import numpy as np

        total: Any = np.zeros(len(self.sent_bytes))
        for action, begins, ends in self.events:
            if action.kind in COMPUTE:
                total += np.nan_to_num(ends - begins)
        found: list[float] = total.tolist()
        return found

    def seconds(self, rank: int) -> dict[str, float]:
        """A rank's seconds by what it does: compute, or wait for others and for transfers."""
        found = {"compute": 0.0, "wait": 0.0}
        for span in self.spans(rank):
            if span.action.kind in COMPUTE:
                found["compute"] += span.end_s - span.begin_s
            elif not span.action.started:
                found["wait"] += span.end_s - span.begin_s
        return found


class StepSimulator:
    """Simulates layouts of a model on some ranks.

    `curves` and `network` are in the order of the layout's devices.
    """

    def __init__(
        self, layers: Sequence[LayerFacts], curves: Sequence[DeviceCurve], network: RankNetwork
    ) -> None:
        self._layers, self._curves, self._network = list(layers), list(curves), network
        self._times: dict[tuple[int, int], tuple[Any, float]] = {}
        self._of_all: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def __call__(self, layout: Layout, *, averages: bool = True) -> SimulatedStep:
        """The step of a layout; without `averages`, one that ends without an average.

        Raises ValueError if its actions can't be executed.
        """
        lists = actions_of(layout, self._layers)
        if not averages:
            between = [action for action in lists[0] if action.kind != "average"]
            lists = [between for _ in lists]
        sizes = TransferSizes(layout, self._layers)
        return play(lists, self._seconds(layout), sizes.of, self._network)

    def _seconds(self, layout: Layout) -> Callable[[Action], Any]:
        """The seconds of each computation, on every rank: a numpy array."""
        import numpy as np

        place = {one.name: number for number, one in enumerate(self._layers)}
        phases = {phase: number for number, phase in enumerate(COMPUTE[:3])}
        parts = [one.micro_batches for one in layout.pipelines]
        most = max(map(len, parts))
        sizes = [[one[part] if part < len(one) else 0 for one in parts] for part in range(most)]
        own = [self._all(of_part) for of_part in sizes]
        joint = [self._all([sum(of_part)] * len(parts)) for of_part in sizes]
        whole = self._all([sum(map(sum, sizes))] * len(parts))
        elements = np.array([sum(one.parameters.values()) for one in self._layers], dtype=float)
        held = {name: self._held(layout, name) for name in layout.rows}
        works = np.array(sizes) > 0 if layout.alone else np.ones((most, len(parts)))

        def seconds(action: Action) -> Any:
            at = place[action.layer]
            share = held.get(action.layer, 1.0)
            if action.kind == "update":
                of_layer = elements[at] / max(1.0, elements.sum())
                return works[action.micro_batch] * share * of_layer * whole[1]
            late = action.kind == "weight-gradient" and layout.sync.get(action.layer) == "factors"
            if late and action.joint:
                return whole[0][:, at, phases["weight-gradient"]]
            times = (joint if action.joint else own)[action.micro_batch][0]
            found = times[:, at, phases[action.kind]]  # type: ignore[index]  # not an update
            return share * found if action.joint else works[action.micro_batch] * found

        return seconds

    def _all(self, batches: Sequence[int]) -> tuple[Any, Any]:
        """Seconds of every layer and phase, and of the update, on every rank."""
        import numpy as np

        key = tuple(batches)
        if key not in self._of_all:
            each = [
                self._timed(curve, batch)
                for curve, batch in zip(self._curves, batches, strict=True)
            ]
            self._of_all[key] = (
                np.array([one[0] for one in each]),
                np.array([one[1] for one in each]),
            )
        return self._of_all[key]

    def _timed(self, curve: DeviceCurve, batch: int) -> tuple[Any, float]:
        """Of a rank; an empty batch runs one sample."""
        key = id(curve), batch
        if key not in self._times:
            self._times[key] = curve.layer_seconds(max(1, batch))
        return self._times[key]

    def _held(self, layout: Layout, layer: str) -> Any:
        """The share of a layer's rows that each rank holds."""
        import numpy as np

        cuts = layout.rows[layer]
        held = [cuts.get(device, (0, 0)) for device in layout.devices]
        counts = np.array([end - begin for begin, end in held])
        return counts / max(1, counts.sum())


def play(
    lists: Sequence[Sequence[Action]],
    seconds: Callable[[Action], Any],
    moved: Callable[[Action], Moved],
    network: RankNetwork,
) -> SimulatedStep:
    """Play lists of actions; `seconds` gives an array over ranks.

    Raises ValueError for lists that can not end (`action_check`).
    """
    playing = _Playing(len(lists), seconds, moved, network)
    if all(one is lists[0] for one in lists):
        for action in lists[0]:
            playing.alike(action)
    else:
        playing.apart(lists)
    return playing.result(lists)


class _Playing:
    """The state of a simulated step: numpy arrays over ranks."""

    def __init__(
        self,
        ranks: int,
        seconds: Callable[[Action], Any],
        moved: Callable[[Action], Moved],
        network: RankNetwork,
    ) -> None:
        import numpy as np

        self._ranks, self._seconds, self._moved, self._network = ranks, seconds, moved, network
        self.now, self.free, self.sent = np.zeros(ranks), np.zeros(ranks), np.zeros(ranks)
        self._ended: dict[str, tuple[float, float]] = {}
        self._spans: list[tuple[Action, Any, Any]] = []
        """action, and arrays of begin and end; not a number where a rank does not do it"""

    def alike(self, action: Action) -> None:
        """An action that all ranks do."""
        import numpy as np

        before = self.now
        if action.kind in COMPUTE:
            self.now = before + self._seconds(action)
        elif action.kind in TRANSFERS:
            begin, end = self._transfer(action, float(before.max()))
            if action.started:
                self._spans.append((action, np.full(self._ranks, begin), np.full(self._ranks, end)))
                return
            self.now = np.maximum(before, end)
        else:
            self.now = np.maximum(before, self._ended[action.name][1])
        self._spans.append((action, before, self.now))

    def _transfer(self, action: Action, reached_s: float) -> tuple[float, float]:
        """When a transfer begins and ends whose last rank has come now."""
        members = list(action.group)
        moved = self._moved(action)
        begin = reached_s
        if action.kind != "agree":
            begin = max(begin, float(self.free[members].max()))
        end = begin + self._network.seconds(moved)
        if action.kind != "agree":
            self.free[members] = end
        self.sent[members] += moved.sent_bytes(self._ranks)[members]
        self._ended[action.name] = begin, end
        return begin, end

    def apart(self, lists: Sequence[Sequence[Action]]) -> None:
        """Lists that differ: each rank goes on until it waits for another."""
        at = [0] * self._ranks
        reached: dict[str, dict[int, float]] = {}
        going = True
        while going:
            going = False
            for rank, actions in enumerate(lists):
                while at[rank] < len(actions) and self._does(rank, actions[at[rank]], reached):
                    at[rank] += 1
                    going = True
        if any(place < len(actions) for place, actions in zip(at, lists, strict=True)):
            raise ValueError("actions: some ranks would wait for ever")

    def _does(self, rank: int, action: Action, reached: dict[str, dict[int, float]]) -> bool:
        """Do an action of one rank; False if it has to wait."""
        before = float(self.now[rank])
        if action.kind in COMPUTE:
            self.now[rank] += self._seconds(action)[rank]
        else:
            if action.kind in TRANSFERS:
                there = reached.setdefault(action.name, {})
                there.setdefault(rank, before)
                if action.name not in self._ended and len(there) == len(action.group):
                    self._transfer(action, max(there.values()))
                if action.started:
                    return True
            if action.name not in self._ended:
                return False
            self.now[rank] = max(before, self._ended[action.name][1])
        self._note(rank, action, before, float(self.now[rank]))
        return True

    def _note(self, rank: int, action: Action, begin: float, end: float) -> None:
        import numpy as np

        begins, ends = np.full(self._ranks, np.nan), np.full(self._ranks, np.nan)
        begins[rank], ends[rank] = begin, end
        self._spans.append((action, begins, ends))

    def result(self, lists: Sequence[Sequence[Action]]) -> SimulatedStep:
        """The whole step."""
        if not all(one is lists[0] for one in lists):
            for rank, actions in enumerate(lists):
                for action in actions:
                    if action.started:
                        self._note(rank, action, *self._ended[action.name])
        return SimulatedStep(float(self.now.max()), self._spans, self.sent.tolist(), self._ended)
