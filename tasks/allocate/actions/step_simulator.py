"""Plays the actions of all ranks against predicted times: step time, waits and bytes of each.

A rank begins a step when it has ended its own part of the step before. If ranks end apart, as those
that multiply factors do, the step is played until each begins as much later than the first one as
it ended.

A rank computes one action after another. A sum begins when the last of its ranks has reached it. In
other transfers each rank sends when it is ready, and has its part when the others' messages are
there. Both begin when the links of their ranks have ended the transfers before them. The small sum
at the end of a step (`agree`) overtakes those. A message between stages begins when its sender has
it, and when the messages before it from this rank to the other have ended; it delays neither other
transfers nor computing. What passes and messages take a stage's rank beside its layers (`own_work`)
is part of the first computation of each pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainwright.estimator.curves import DeviceCurve
from trainwright.estimator.predict.pass_cost import PassCost
from trainwright.estimator.structure import LayerFacts, Unit
from trainwright.tasks.allocate.actions.action import COMPUTE, TRANSFERS, Action
from trainwright.tasks.allocate.actions.actions import StepParts, actions_of
from trainwright.tasks.allocate.actions.network import RankNetwork
from trainwright.tasks.allocate.actions.own_work import OwnWork, own_work
from trainwright.tasks.allocate.actions.transfer_sizes import Moved, TransferSizes
from trainwright.tasks.runs.artefacts.layout import Layout

_ROUNDING = 1e-9
_SAME_START, _MOST_PLAYED = 0.01, 4
"""Starts that differ by a smaller share of the step are the same; a step is played as often."""


@dataclass(frozen=True)
class Span:
    """When a rank did an action, in seconds since the first rank began the step."""

    action: Action
    begin_s: float
    end_s: float


@dataclass
class SimulatedStep:
    """A step as predicted."""

    step_s: float
    """from the beginning of a step to that of the next one"""
    events: list[tuple[Action, Any, Any]]
    """action, and arrays over ranks of its begin and end; not a number: the rank does not do it.
    None of them if only the step's time was asked for."""
    sent_bytes: list[float]
    """by rank"""
    computed_s: list[float]
    """seconds that each rank computes"""
    on_wire: dict[str, tuple[float, float]] = field(default_factory=dict)
    """begin and end of each transfer and message, by name"""

    def spans(self, rank: int) -> list[Span]:
        """What a rank does; of started transfers, when they are on the wire."""
        return [
            Span(action, float(begins[rank]), float(ends[rank]))
            for action, begins, ends in self.events
            if begins[rank] == begins[rank]
        ]

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

    `curves` and `network` are in the order of the layout's devices. `units` are needed for
    pipelines of several stages. `passes`: what those take a rank beside its layers; None: nothing.
    """

    def __init__(
        self,
        layers: Sequence[LayerFacts],
        curves: Sequence[DeviceCurve],
        network: RankNetwork,
        units: Sequence[Unit] = (),
        passes: PassCost | None = None,
    ) -> None:
        self._layers, self._curves, self._network = list(layers), list(curves), network
        self._units, self._passes = list(units), passes
        self._times: dict[tuple[int, int], tuple[Any, float]] = {}
        self._of_all: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def __call__(
        self, layout: Layout, *, averages: bool = True, events: bool = True
    ) -> SimulatedStep:
        """The step of a layout; without `averages`, one that ends without an average.

        Without `events`, which is quicker, they are left out. Raises ValueError if its actions
        can't be executed.
        """
        if not events and averages and not layout.has_stages:
            sizes = TransferSizes(layout, self._layers)
            parts = StepParts(layout, self._layers)
            return play_parts(
                parts, len(layout.pipelines), self._seconds(layout), sizes.of, self._network
            )
        lists = actions_of(layout, self._layers, self._units)
        if not averages and not layout.has_stages:
            between = [action for action in lists[0] if action.kind != "average"]
            lists = [between for _ in lists]
        sizes = TransferSizes(layout, self._layers, self._units)
        seconds, passes = self._seconds(layout), self._passes
        if passes is None or not layout.has_stages:
            return play(lists, seconds, sizes.of, self._network, events=events)
        own = own_work(lists, self._curves, passes, seconds, sizes.of)
        return play(lists, seconds, sizes.of, self._network, own, passes.delay_s, events=events)

    def _seconds(self, layout: Layout) -> Callable[[Action], Any]:
        """The seconds of each computation, on every rank: a numpy array."""
        import numpy as np

        place = {one.name: number for number, one in enumerate(self._layers)}
        phases: dict[str, int] = {phase: number for number, phase in enumerate(COMPUTE[:3])}
        phases["recompute"] = phases["forward"]
        parts = [one.micro_batches for one in layout.pipelines for _ in one.stages]
        most, ranks = max(map(len, parts)), len(parts)
        sizes = [[one[part] if part < len(one) else 0 for one in parts] for part in range(most)]
        own = [self._all(of_part) for of_part in sizes]
        joint_sizes = [
            sum(
                one.micro_batches[part] for one in layout.pipelines if part < len(one.micro_batches)
            )
            for part in range(most)
        ]
        joint = [self._all([size] * ranks) for size in joint_sizes]
        whole = self._all([sum(joint_sizes)] * ranks)
        elements = np.array([sum(one.parameters.values()) for one in self._layers], dtype=float)
        held = {name: self._held(layout, name) for name in layout.rows}
        works = np.array(sizes) > 0 if layout.alone else np.ones((most, ranks))

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
            found = times[:, at, phases[action.kind]]
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
    own: OwnWork | None = None,
    delay_s: float = 0.0,
    *,
    events: bool = True,
) -> SimulatedStep:
    """Play lists of actions; `seconds` gives an array over ranks.

    `own` is work beside those, and `delay_s` of a message that beside the link's time. `events`:
    whether the result has them. Raises ValueError for lists that can not end (`action_check`).
    """
    alike = all(one is lists[0] for one in lists)

    def once(starts: Any) -> _Playing:
        playing = _Playing(starts, seconds, moved, network, events=events)
        playing.own, playing.delay_s = own or {}, delay_s
        if alike:
            for action in lists[0]:
                playing.alike(action)
        else:
            playing.apart(lists)
        return playing

    playing, step_s = _until_steady(once, len(lists))
    return playing.result(lists, step_s)


def play_parts(
    parts: StepParts,
    ranks: int,
    seconds: Callable[[Action], Any],
    moved: Callable[[Action], Moved],
    network: RankNetwork,
) -> SimulatedStep:
    """The same of ranks that all do the same, without events.

    Micro-batches that add as much as the one before are not played one by one.
    """

    def once(starts: Any) -> _Playing:
        playing = _Playing(starts, seconds, moved, network, events=False)
        playing.parts(parts)
        return playing

    playing, step_s = _until_steady(once, ranks)
    return playing.result([], step_s)


def _until_steady(once: Callable[[Any], _Playing], ranks: int) -> tuple[_Playing, float]:
    """A step whose ranks begin as much apart as they end, with its seconds."""
    import numpy as np

    starts = np.zeros(ranks)
    for _ in range(_MOST_PLAYED):
        playing = once(starts)
        step_s = float((playing.now - starts).max())
        if not playing.on_wire:  # no rank waits for another
            break
        following = playing.now - playing.now.min()
        if float(np.abs(following - starts).max()) <= _SAME_START * step_s:
            break
        starts = following
    return playing, step_s


class _Playing:
    """The state of a simulated step: numpy arrays over ranks."""

    def __init__(
        self,
        starts: Any,
        seconds: Callable[[Action], Any],
        moved: Callable[[Action], Moved],
        network: RankNetwork,
        *,
        events: bool,
    ) -> None:
        """`starts`: when each rank begins."""
        import numpy as np

        self._has_events = events
        self._costs: dict[tuple[str, str, int, bool], list[float]] = {}
        """seconds of a computation by rank"""
        self.computed = np.zeros(len(starts))
        """seconds that each rank has computed"""

        self._ranks = ranks = len(starts)
        self._seconds, self._moved, self._network = seconds, moved, network
        self.now, self.sent = starts.copy(), np.zeros(ranks)
        self.sending, self.receiving = np.zeros(ranks), np.zeros(ranks)
        """until when earlier transfers leave each rank, and arrive there"""
        self.own: OwnWork = {}
        self.delay_s = 0.0
        """of a message, beside the link's time"""
        self.on_wire: dict[str, tuple[float, float]] = {}
        """begin and end of each transfer and message, by name"""
        self._arrived: dict[str, Any] = {}
        """when each rank has what a transfer or message brings it: arrays"""
        self._directions: dict[tuple[int, ...], float] = {}
        """when the last message from one rank to another ends"""
        self._spans: list[tuple[Action, Any, Any]] = []
        """action, and arrays of begin and end; not a number where a rank does not do it"""

    def alike(self, action: Action) -> None:
        """An action that all ranks do."""
        import numpy as np

        before = self.now
        if action.kind in COMPUTE:
            work_s = self._seconds(action)
            self.now = before + work_s
            self.computed = self.computed + work_s
        elif action.kind in TRANSFERS:
            begins, ends = self._transfer(action, before)
            if action.started:
                if self._has_events:
                    self._spans.append((action, begins, ends))
                return
            self.now = np.maximum(before, ends)
        else:
            self.now = np.maximum(before, self._arrived[action.name])
        if self._has_events:
            self._spans.append((action, before, self.now))

    def parts(self, parts: StepParts) -> None:
        """The micro-batches of a step that all ranks do alike, and what follows them.

        When starts and ends of all ranks and links have moved by the same time in a micro-batch (or
        nothing was sent), the next one with as many samples moves them by that again, since they
        depend on each other by sums and maxima only.
        """
        import numpy as np

        part = 0
        while part < parts.count:
            before = self._state()
            for action in parts.of(part):
                self.alike(action)
            more = self._state() - before
            times, again = more[:3], parts.alike_after(part)
            sends = bool(times[1:].any())
            if again and (not sends or np.ptp(times) <= _ROUNDING * times.max()):
                self.now, self.sending, self.receiving, self.sent, self.computed = (
                    self._state() + again * more
                )
                part += again
            part += 1
        for action in parts.finish():
            self.alike(action)

    def _state(self) -> Any:
        """Arrays over ranks: all that later actions begin with, and what was done."""
        import numpy as np

        return np.array([self.now, self.sending, self.receiving, self.sent, self.computed])

    def _transfer(self, action: Action, reached: Any) -> tuple[Any, Any]:
        """When a transfer begins and ends for each rank, by when its ranks have come: arrays."""
        import numpy as np

        members = list(action.group)
        moved, network = self._moved(action), self._network.among(members)
        begins = reached.copy()
        if moved.pairs is None:
            if action.kind != "agree":
                begins = np.maximum(begins, np.maximum(self.sending, self.receiving))
            begins[members] = begins[members].max()
            left = arrived = begins[members] + network.seconds(moved)
        else:
            begins = np.maximum(begins, self.sending)
            left, arrived = network.arrivals(moved, begins[members], self.receiving[members])
        ends = begins.copy()
        ends[members] = arrived
        if action.kind != "agree":
            self.sending[members], self.receiving[members] = left, arrived
        self.sent[members] += moved.sent_bytes(self._ranks)[members]
        self._arrived[action.name] = ends
        self.on_wire[action.name] = float(begins[members].min()), float(ends[members].max())
        return begins, ends

    def _send(self, action: Action, reached_s: float) -> None:
        import numpy as np

        moved = self._moved(action)
        begin = max(reached_s, self._directions.get(action.group, 0.0))
        end = begin + self._network.among(action.group).seconds(moved)
        self._directions[action.group] = end
        self.sent += moved.sent_bytes(self._ranks)
        self.on_wire[action.name] = begin, end + self.delay_s
        self._arrived[action.name] = np.full(self._ranks, end + self.delay_s)

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
        import numpy as np

        before = float(self.now[rank])
        if action.kind in COMPUTE:
            key = (action.kind, action.layer, action.micro_batch, action.joint)
            if key not in self._costs:
                self._costs[key] = self._seconds(action).tolist()
            work_s = self._costs[key][rank]
            if action.begins:
                work_s += self.own.get((rank, action.name), 0.0)
            self.now[rank] += work_s
            self.computed[rank] += work_s
        else:
            if action.kind == "send":
                self._send(action, before)
                return True
            if action.kind in TRANSFERS:
                there = reached.setdefault(action.name, {})
                there.setdefault(rank, before)
                if action.name not in self._arrived and len(there) == len(action.group):
                    times = np.zeros(self._ranks)
                    times[list(there)] = list(there.values())
                    self._transfer(action, times)
                if action.started:
                    return True
            if action.name not in self._arrived:
                return False
            self.now[rank] = max(before, float(self._arrived[action.name][rank]))
        if self._has_events:
            self._note(rank, action, before, float(self.now[rank]))
        return True

    def _note(self, rank: int, action: Action, begin: float, end: float) -> None:
        import numpy as np

        begins, ends = np.full(self._ranks, np.nan), np.full(self._ranks, np.nan)
        begins[rank], ends[rank] = begin, end
        self._spans.append((action, begins, ends))

    def result(self, lists: Sequence[Sequence[Action]], step_s: float) -> SimulatedStep:
        """The whole step, which takes so long."""
        if self._has_events and not all(one is lists[0] for one in lists):
            for rank, actions in enumerate(lists):
                for action in actions:
                    if action.started:
                        self._note(rank, action, *self.on_wire[action.name])
        return SimulatedStep(
            step_s, self._spans, self.sent.tolist(), self.computed.tolist(), self.on_wire
        )
