"""Plays the actions of all ranks against predicted times: step time, waits and bytes of each.

A rank computes one action after another. A transfer begins when the last of its ranks has reached
it, and when the links of its ranks have ended the transfers before it. The small sum at the end of
a step (`agree`) overtakes those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from trainwright.estimator.curves import DeviceCurve, LayerSeconds
from trainwright.estimator.structure import LayerFacts
from trainwright.tasks.allocate.layouts.actions import COMPUTE, TRANSFERS, Action, actions_of
from trainwright.tasks.allocate.layouts.network import Network
from trainwright.tasks.allocate.layouts.transfers import Moved, TransferSizes
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
    spans: list[list[Span]] = field(default_factory=list)
    """by rank; of started transfers, when they were on the wire"""
    sent_bytes: list[float] = field(default_factory=list)
    """by rank"""

    def seconds(self, rank: int) -> dict[str, float]:
        """A rank's seconds by what it does: compute, transfer (blocking), wait."""
        found = {"compute": 0.0, "wait": 0.0}
        for span in self.spans[rank]:
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
        self, layers: Sequence[LayerFacts], curves: Sequence[DeviceCurve], network: Network
    ) -> None:
        self._layers, self._curves, self._network = list(layers), list(curves), network
        self._place = {one.name: place for place, one in enumerate(layers)}
        self._elements = sum(sum(one.parameters.values()) for one in layers) or 1

    def __call__(self, layout: Layout) -> SimulatedStep:
        """The step of a layout. Raises ValueError if its actions can't be executed."""
        lists = actions_of(layout, self._layers)
        sizes = TransferSizes(layout, self._layers)
        seconds = [self._seconds(layout, rank) for rank in range(len(lists))]
        return play(lists, seconds, lambda action: sizes.of(action), self._network)

    def _seconds(self, layout: Layout, rank: int) -> Callable[[Action], float]:
        """The time of each computation on a rank."""
        curve, parts = self._curves[rank], layout.pipelines[rank].micro_batches
        device = layout.devices[rank]
        sizes = [one.micro_batches for one in layout.pipelines]
        most = max(map(len, sizes))
        totals = [sum(one[part] if part < len(one) else 0 for one in sizes) for part in range(most)]
        own = [_timed(curve, parts[part] if part < len(parts) else 0) for part in range(most)]
        joint = [_timed(curve, total) for total in totals]
        whole = _timed(curve, sum(totals))

        def seconds(action: Action) -> float:
            if action.kind == "update":
                return self._share_of_update(layout, device, action.layer) * whole[1]
            place = self._place[action.layer]
            factors = (
                action.kind == "weight-gradient" and layout.sync.get(action.layer) == "factors"
            )
            if factors:
                return whole[0][place].weight_gradient
            times = (joint if action.joint else own)[action.micro_batch][0][place]
            found: float = getattr(times, action.kind.replace("-", "_"))
            return found * self._held(layout, device, action.layer) if action.joint else found

        return seconds

    def _held(self, layout: Layout, device: str, layer: str) -> float:
        """The share of a layer's rows that a device holds; 1 if it is not divided."""
        cuts = layout.rows.get(layer)
        if layout.how(layer) != "rows" or cuts is None:
            return 1.0
        begin, end = cuts.get(device, (0, 0))
        return (end - begin) / max(one[1] for one in cuts.values())

    def _share_of_update(self, layout: Layout, device: str, layer: str) -> float:
        elements = sum(self._layers[self._place[layer]].parameters.values())
        return self._held(layout, device, layer) * elements / self._elements


def _timed(curve: DeviceCurve, batch: int) -> tuple[list[LayerSeconds], float]:
    """Seconds of each layer and of the update; an empty batch runs one sample."""
    return curve.layer_seconds(max(1, batch))


def play(
    lists: Sequence[Sequence[Action]],
    seconds: Sequence[Callable[[Action], float]],
    moved: Callable[[Action], Moved],
    network: Network,
) -> SimulatedStep:
    """Play lists of actions. Raises ValueError for lists that can't end (`check`)."""
    ranks = len(lists)
    at, now = [0] * ranks, [0.0] * ranks
    free = [0.0] * ranks
    spans: list[list[Span]] = [[] for _ in range(ranks)]
    arrived: dict[str, dict[int, float]] = {}
    ended: dict[str, tuple[float, float]] = {}
    sent = [0.0] * ranks
    going = True
    while going:
        going = False
        for rank, actions in enumerate(lists):
            while at[rank] < len(actions):
                action = actions[at[rank]]
                if action.kind in COMPUTE:
                    end = now[rank] + seconds[rank](action)
                    spans[rank].append(Span(action, now[rank], end))
                    now[rank] = end
                elif action.kind in TRANSFERS:
                    there = arrived.setdefault(action.name, {})
                    there.setdefault(rank, now[rank])
                    if action.name not in ended and len(there) == len(action.group):
                        what = moved(action)
                        begin = max(there.values())
                        if action.kind != "agree":
                            begin = max(begin, *(free[one] for one in action.group))
                        end = begin + network.seconds(what)
                        ended[action.name] = (begin, end)
                        out = what.sent_bytes(ranks)
                        for one in action.group:
                            sent[one] += float(out[one])
                            if action.kind != "agree":
                                free[one] = end
                    if not action.started:
                        if action.name not in ended:
                            break
                        spans[rank].append(Span(action, now[rank], ended[action.name][1]))
                        now[rank] = ended[action.name][1]
                else:  # wait
                    if action.name not in ended:
                        break
                    end = max(now[rank], ended[action.name][1])
                    spans[rank].append(Span(action, now[rank], end))
                    now[rank] = end
                at[rank] += 1
                going = True
    if any(place < len(actions) for place, actions in zip(at, lists, strict=True)):
        raise ValueError("actions: some ranks would wait for ever")
    for rank, actions in enumerate(lists):
        spans[rank] += [
            Span(action, *ended[action.name])
            for action in actions
            if action.started and action.name in ended
        ]
    return SimulatedStep(max(now), spans, sent)
