"""Chooses how each layer's copies are kept equal on given devices, by simulated steps.

It begins with data parallel and tries, for one layer after another, beginning with the largest, the
other ways that the layer permits; a way that makes the step shorter is kept. Alike layers are tried
together too, since each alone may not pay. Nothing here changes the mathematics of training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from trainwright.estimator.devices import DEVICE_TYPES, LINK_SHARE, summing_type
from trainwright.estimator.predict.communication import Link
from trainwright.estimator.structure import LayerFacts
from trainwright.tasks.allocate.actions.network import RankNetwork
from trainwright.tasks.allocate.actions.step_simulator import SimulatedStep, StepSimulator
from trainwright.tasks.allocate.layouts.memory import LayoutMemory, Shortage, state_tensors
from trainwright.tasks.allocate.layouts.permitted import why_not
from trainwright.tasks.allocate.layouts.resends import Resends
from trainwright.tasks.allocate.plan.collectives import INNER
from trainwright.tasks.allocate.plan.configuration import Configuration
from trainwright.tasks.allocate.plan.cost import CostModel
from trainwright.tasks.allocate.plan.split import shares
from trainwright.tasks.allocate.plan.topology import THIS_MACHINE, Links, links_of, machine_of
from trainwright.tasks.runs.artefacts.layout import (
    CHUNK_BYTES,
    Layout,
    Pipeline,
    Stage,
    Sync,
    name_of,
)
from trainwright.tasks.runs.artefacts.plan import MachineLinks
from trainwright.tasks.spec.pool import Device

MOST_COMPARED = 64
CHUNK_SIZES = tuple(1 << power for power in range(18, 26))
"""256 KiB to 32 MiB"""
MOST_CHUNKS = 128
"""More of them hide less than a hundredth more."""
_ALIKE = 0.02
"""the share by which steps are about equal"""
_ROUNDS = 3
_DENSE: tuple[Sync, ...] = ("factors", "rows")


@dataclass(frozen=True)
class SimulatedLayout:
    """A layout with its simulated step."""

    layout: Layout
    step: SimulatedStep
    shortage: Shortage | None = None
    """None: it fits on all devices"""

    @property
    def value(self) -> tuple[float, float]:
        """Less is better: first it must fit into memory, then the step should be short."""
        over = 0.0 if self.shortage is None else self.shortage.over_bytes
        return over, self.step.step_s

    def better(self, other: SimulatedLayout) -> bool:
        """Whether it is better than another, by more than rounding."""
        (over, step_s), (most, most_s) = self.value, other.value
        return step_s < most_s * (1 - 1e-9) if over == most else over < most


class LayoutChoice:
    """The layouts of a model on the devices of a configuration."""

    def __init__(
        self,
        result: Configuration,
        chunk_bytes: int = CHUNK_BYTES,
        factor_type: Literal["fp32", "bf16"] = "fp32",
    ) -> None:
        model = result.topology.model
        self._devices = result.devices()
        self._parts = result.accumulation
        self._chunk_bytes, self._factor_type = chunk_bytes, factor_type
        self.layers: Sequence[LayerFacts] = model.estimate.layers
        curves = [model.kind(device).curve for device, _ in self._devices]
        devices = [device for device, _ in self._devices]
        self._network = RankNetwork.of(devices, links_between(model, devices))
        units = model.estimate.units
        self._simulate = StepSimulator(
            self.layers, curves, self._network, units, model.estimate.pass_cost
        )
        copies = state_tensors(model.job.train.optimizer) - 1  # gradients are not sent
        self._resends = Resends(self.layers, devices, self._network, copies)
        self._joint_s = [curve.median_s(result.batch) for curve in curves]
        """seconds of each device for the joint batch"""
        self._names = tops(self.layers)
        self._memory = LayoutMemory(result, self.layers)
        self._simulated: dict[frozenset[tuple[str, Sync]], SimulatedLayout] = {}

    @property
    def possible(self) -> bool:
        """Whether there is anything to choose: several ranks, and layers that are known."""
        return len(self._devices) > 1 and bool(self.layers)

    @property
    def is_compared(self) -> bool:
        """Whether layouts are compared unasked: between machines, for `MOST_COMPARED` devices."""
        return self.why_not_compared is None

    @property
    def why_not_compared(self) -> str | None:
        """Why layouts are not compared unasked; None if they are."""
        if len({machine_of(device) for device, _ in self._devices}) == 1:
            return "on one machine, others are not compared unless train.layout names one"
        if len(self._devices) > MOST_COMPARED:
            return f"others are compared for at most {MOST_COMPARED} devices"
        return None

    def needs(self, layout: Layout) -> dict[str, float]:
        """Peak memory of each device in bytes, by id."""
        found: list[float] = self._memory.needs(layout).tolist()
        return {device.id: need for (device, _), need in zip(self._devices, found, strict=True)}

    def shortage(self, layout: Layout) -> Shortage | None:
        """The device whose memory lacks most; None if the layout fits on all."""
        return self._memory.shortage(layout)

    def with_syncs(self, syncs: Mapping[str, Sync]) -> SimulatedLayout:
        """The layout in which these layers are not summed, simulated once."""
        key = frozenset(syncs.items())
        if key not in self._simulated:
            layout = self.layout(syncs)
            with_resends = self._resends.added(layout, self._simulate(layout, events=False))
            self._simulated[key] = SimulatedLayout(*with_resends, self.shortage(layout))
        return self._simulated[key]

    def simulated(self, layout: Layout, *, averages: bool = True) -> SimulatedStep:
        """A step of any layout on these devices; without `averages`, one between averages."""
        return self._simulate(layout, averages=averages)

    def with_best_chunks(self, layout: Layout) -> SimulatedLayout:
        """The layout with the chunk size by which its step is shortest.

        Of the sizes that are about as good, the one nearest to `CHUNK_BYTES`: each chunk costs a
        little more than the simulation knows.
        """
        summed = sum(one.parameter_bytes for one in self.layers if layout.how(one.name) == "sum")
        sizes = [one for one in CHUNK_SIZES if summed <= MOST_CHUNKS * one] or [CHUNK_SIZES[-1]]
        if not self.is_compared or not summed:
            sizes = [layout.chunk_bytes]
        tried = [layout.model_copy(update={"chunk_bytes": size}) for size in sizes]
        found = [
            SimulatedLayout(
                *self._resends.added(one, self._simulate(one, events=False)), self.shortage(one)
            )
            for one in tried
        ]
        good = min(each.step.step_s for each in found) * (1 + _ALIKE)
        alike = [each for each in found if each.step.step_s <= good]
        return min(alike, key=lambda each: abs(math.log(each.layout.chunk_bytes / CHUNK_BYTES)))

    def layout(self, syncs: Mapping[str, Sync]) -> Layout:
        """The layout in which these layers are not summed."""
        used: dict[str, Sync] = {name: sync for name, sync in syncs.items() if sync != "sum"}
        trained: dict[str, Sync] = {
            one.name: used.get(one.name, "sum") for one in self.layers if one.parameters
        }
        found = Layout(
            name=name_of({*trained.values()}, 1),
            pipelines=[
                Pipeline(
                    micro_batches=micro_batches(batch, self._parts),
                    stages=[Stage(device=device.id, layers=self._names)],
                )
                for device, batch in self._devices
            ],
            sync=used,
            chunk_bytes=self._chunk_bytes,
            factor_type=self._factor_type,
        )
        cut = [one for one in self.layers if used.get(one.name) == "rows"]
        if not cut:
            return found
        held = self._memory.row_shares(found, [1 / one for one in self._joint_s])
        return found.model_copy(update={"rows": {one.name: self._cuts(one, held) for one in cut}})

    def _cuts(self, layer: LayerFacts, held: Sequence[float]) -> dict[str, tuple[int, int]]:
        """Rows in proportion to these shares."""
        dense = layer.dense
        assert dense is not None, layer.name
        total = dense.inputs if dense.kind == "embedding" else dense.outputs
        counts = shares(total, [round(1e6 * one / max(held)) for one in held])
        ends = [sum(counts[: number + 1]) for number in range(len(counts))]
        return {
            device.id: (end - count, end)
            for (device, _), count, end in zip(self._devices, counts, ends, strict=True)
        }

    def everywhere(self, sync: Sync) -> SimulatedLayout | None:
        """The layout in which every layer that permits it is kept equal so; None if none does."""
        syncs = {
            one.name: sync for one in self.layers if one.parameters and why_not(one, sync) is None
        }
        return self.with_syncs(syncs) if syncs else None

    def best(self, allowed: Sequence[Sync] = _DENSE) -> SimulatedLayout:
        """The shortest step that was found."""
        dense, found = self._dense(), self.with_syncs({})
        starts = [self.everywhere(sync) for sync in allowed]
        for one in starts:
            if one is not None and one.better(found):
                found = one
        for _ in range(_ROUNDS):
            before = found
            for group in _alike(dense):
                ways: tuple[Sync, ...] = ("sum", *allowed)
                for sync in ways:
                    if any(why_not(one, sync) for one in group):
                        continue
                    if all(found.layout.how(one.name) == sync for one in group):
                        continue
                    syncs = {**found.layout.sync, **{one.name: sync for one in group}}
                    syncs = {name: each for name, each in syncs.items() if each != "sum"}
                    tried = self.with_syncs(syncs)
                    if tried.better(found):
                        found = tried
            if found is before:
                break
        return found

    def mixed(self) -> SimulatedLayout | None:
        """The shortest step in which some layers are summed and a group of others is not."""
        found: SimulatedLayout | None = None
        for group in _alike(self._dense()):
            for sync in _DENSE:
                if any(why_not(one, sync) for one in group):
                    continue
                tried = self.with_syncs({one.name: sync for one in group})
                if tried.layout.name == "hybrid" and (found is None or tried.better(found)):
                    found = tried
        return found

    def _dense(self) -> list[LayerFacts]:
        """The layers that may be more than summed, the largest first."""
        found = [one for one in self.layers if one.parameters and not why_not(one, "factors")]
        return sorted(found, key=lambda one: -one.parameter_bytes)

    def candidates(self) -> list[SimulatedLayout]:
        """The layouts to compare, each once; data parallel first."""
        tried = [
            self.with_syncs({}),
            self.everywhere("factors"),
            self.everywhere("rows"),
            self.best(),
        ]
        if not any(one is not None and one.layout.name == "hybrid" for one in tried):
            tried.append(self.mixed())
        found: list[SimulatedLayout] = []
        for one in tried:
            if one is not None and all(one is not other for other in found):
                found.append(one)
        return found


def _alike(layers: Sequence[LayerFacts]) -> list[list[LayerFacts]]:
    """Groups of layers with the same sizes, and each layer of a small group alone too."""
    groups: dict[object, list[LayerFacts]] = {}
    for one in layers:
        groups.setdefault((one.dense, one.parameter_bytes), []).append(one)
    found = list(groups.values())
    return found + [[one] for group in found if 1 < len(group) <= 4 for one in group]


def micro_batches(batch: int, parts: int) -> list[int]:
    """The samples of each micro-batch, as even as they can be."""
    return [batch // parts + (number < batch % parts) for number in range(parts)]


def tops(layers: Sequence[LayerFacts]) -> list[str]:
    """The outermost modules that contain all layers, in order; without the loss."""
    return list(dict.fromkeys(one.name.partition(".")[0] for one in layers if one.kind != "loss"))


def links_between(model: CostModel, devices: Sequence[Device]) -> dict[str, MachineLinks]:
    """The links that predictions assume for some devices, by machine."""
    links, found = links_of(model.pool), dict[str, MachineLinks]()
    summing = summing_type([device.type for device in devices])
    for name in sorted({machine_of(device) for device in devices}):
        own = links.get(name, Links(INNER, INNER, (None, None)))
        measured = model.estimate.local_link if name == THIS_MACHINE else None
        found[name] = MachineLinks(
            between=_link(*own.network),
            inside=measured or _link(*own.inner),
            sums=None if summing is None else _link(*own.inside(summing)),
            source=_link_source(own, summing, measured),
        )
    return found


def _link_source(links: Links, summing: str | None, measured: Link | None) -> str:
    """What the links inside a machine are, and where their figures are from."""
    if summing is None and measured is not None:
        return "memory of the host, measured"
    what = "memory of the host" if summing is None else str(DEVICE_TYPES[summing].link)
    if all(links.given):
        return f"{what}, as the pool file states"
    where = "assumed"
    if summing is not None:
        where = f"assumed: {LINK_SHARE:.0%} of the datasheet of {summing}"
    partly = ", partly as the pool file states" if any(links.given) else ""
    return f"{what}, {where}{partly}"


def _link(bandwidth_bytes_per_s: float, latency_s: float) -> Link:
    return Link(bandwidth_bytes_per_s=bandwidth_bytes_per_s, latency_s=latency_s, spread=0.0)
