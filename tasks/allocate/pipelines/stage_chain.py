"""What stages of a model take on some devices: the values that the partition is searched with."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainwright.estimator.curves import DeviceCurve
from trainwright.estimator.predict.pass_cost import PassCost
from trainwright.estimator.structure import LayerFacts, Unit
from trainwright.tasks.allocate.actions.network import RankNetwork
from trainwright.tasks.allocate.actions.stage_parts import layers_of_units
from trainwright.tasks.allocate.actions.transfer_sizes import Moved
from trainwright.tasks.allocate.pipelines.stage_cost import StageCost


@dataclass(frozen=True)
class StageChain:
    """A chain of units and some devices. Numpy arrays; d, e are devices, u is a unit.

    Micro-batches have one or two sizes; `sizes` has the size of each, as its place in the arrays.
    """

    sizes: tuple[int, ...]
    forward: Any
    """seconds (size, d, u)"""
    input_gradient: Any
    weight_gradient: Any
    update: Any
    """seconds of the optimizer (d, u)"""
    crossing_bytes: Any
    """(size, u): what crosses a cut after the unit"""
    latency_s: Any
    """(d, e)"""
    s_per_byte: Any
    """(d, e)"""
    state_bytes: Any
    """(u): parameters, gradients, the optimizer's tensors"""
    kept_bytes: Any
    """(u): for each micro-batch in flight"""
    room_bytes: Any
    """(d): memory for both; infinite: not known"""
    alike: tuple[int, ...]
    """by device: devices of one number do not differ"""
    own: StageCost
    """what passes take beside their layers"""
    layers: Any
    """(u): how many layers compute in it"""

    @property
    def units(self) -> int:
        """Number of units."""
        return int(self.state_bytes.shape[0])

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches."""
        return len(self.sizes)

    @property
    def devices(self) -> int:
        """Number of devices."""
        return len(self.alike)

    def sums(self, values: Any) -> Any:
        """Sums of the first 0, 1, … units, along the last axis."""
        return _sums(values)

    @functools.cached_property
    def prefixes(self) -> tuple[Any, Any, Any, Any]:
        """Sums over units of forward, input gradient, weight gradient (size, d, u + 1), update."""
        parts = (self.forward, self.input_gradient, self.weight_gradient, self.update)
        return tuple(_sums(one) for one in parts)

    @functools.cached_property
    def mean_seconds(self) -> Any:
        """Seconds of all passes over a micro-batch, as the mean of all (d, u)."""
        return self.mean(self.forward + self.input_gradient + self.weight_gradient)

    def mean(self, values: Any) -> Any:
        """The mean over micro-batches of an array by size."""
        import numpy as np

        share = np.bincount(self.sizes, minlength=len(values)) / len(self.sizes)
        return np.tensordot(share, values, axes=1)

    @functools.cached_property
    def mean_crossing_s(self) -> Any:
        """Seconds until a message over each cut is there, as the mean of all (d, e, u)."""
        crossing = self.mean(self.crossing_bytes)
        latency_s = self.latency_s + self.own.delay_s
        return latency_s[:, :, None] + self.s_per_byte[:, :, None] * crossing

    def with_links(self, latency_s: Any, s_per_byte: Any) -> StageChain:
        """The same with other links."""
        return replace(self, latency_s=latency_s, s_per_byte=s_per_byte)

    def with_room(self, room_bytes: Any) -> StageChain:
        """The same with other memories."""
        return replace(self, room_bytes=room_bytes)

    def joined(self, ends: Sequence[int]) -> StageChain:
        """The chain with units joined: the first ends with unit ends[0] - 1, and so on."""
        import numpy as np

        begins = [0, *ends[:-1]]

        def sums(values: Any) -> Any:
            return np.add.reduceat(values, begins, axis=-1)

        return replace(
            self,
            forward=sums(self.forward),
            input_gradient=sums(self.input_gradient),
            weight_gradient=sums(self.weight_gradient),
            update=sums(self.update),
            crossing_bytes=self.crossing_bytes[:, np.array(ends) - 1],
            state_bytes=sums(self.state_bytes),
            kept_bytes=sums(self.kept_bytes),
            layers=sums(self.layers),
        )

    def even_ends(self, count: int) -> list[int]:
        """Ends of so many runs of units, or fewer, which take about as long."""
        import numpy as np

        done = np.cumsum(self.mean_seconds.mean(axis=0))
        wanted = done[-1] * np.arange(1, count) / count
        inner = np.searchsorted(done, wanted, side="left") + 1
        return sorted({*inner.tolist(), self.units})

    def recomputing(self) -> StageChain:
        """The same with every unit recomputed: it keeps what it gets from the unit before.

        The largest one is made again at once.
        """
        import numpy as np

        entering = np.append(0.0, self.crossing_bytes[0][:-1])
        kept = np.minimum(self.kept_bytes, entering)
        return replace(
            self,
            kept_bytes=kept,
            room_bytes=self.room_bytes - (self.kept_bytes - kept).max(),
            input_gradient=self.input_gradient + self.forward,
        )

    def of_devices(self, devices: Sequence[int]) -> StageChain:
        """The same on some of the devices."""
        import numpy as np

        own = list(devices)
        pairs = np.ix_(own, own)
        return StageChain(
            self.sizes,
            self.forward[:, own],
            self.input_gradient[:, own],
            self.weight_gradient[:, own],
            self.update[own],
            self.crossing_bytes,
            self.latency_s[pairs],
            self.s_per_byte[pairs],
            self.state_bytes,
            self.kept_bytes,
            self.room_bytes[own],
            tuple(self.alike[one] for one in own),
            self.own.of_devices(own),
            self.layers,
        )


def _sums(values: Any) -> Any:
    import numpy as np

    zero = np.zeros((*values.shape[:-1], 1))
    return np.concatenate([zero, np.cumsum(values, axis=-1)], axis=-1)


def stage_chain(
    layers: Sequence[LayerFacts],
    units: Sequence[Unit],
    curves: Sequence[DeviceCurve],
    network: RankNetwork,
    micro_batches: Sequence[int],
    *,
    tensors: float,
    room_bytes: Sequence[float],
    passes: PassCost | None = None,
) -> StageChain:
    """The chain of a model for micro-batches of these samples.

    `curves`, `network` and `room_bytes` are by device; a device keeps `tensors` tensors of each
    parameter's size. `passes`: what passes take beside layers; None: nothing. Raises BadInput if
    the model has no units.
    """
    import numpy as np

    by_unit = list(layers_of_units(layers, units).values())
    place = {one.name: number for number, one in enumerate(layers)}
    owners = np.zeros((len(units), len(layers)))
    for number, own in enumerate(by_unit):
        for layer in own:
            owners[number, place[layer.name]] = 1.0
    samples = sorted(set(micro_batches), reverse=True)
    known: dict[tuple[int, int], Any] = {}
    for size in samples:
        for curve in curves:
            key = id(curve), size
            if key not in known:
                parts, _ = curve.layer_seconds(max(1, size))
                known[key] = owners @ np.array(parts)
    whole = sum(micro_batches)
    elements = np.array([sum(one.parameters.values()) for one in layers], dtype=float)
    of_unit = owners @ elements / max(1.0, elements.sum())
    seconds = np.array([[known[id(curve), size] for curve in curves] for size in samples])
    largest = max(samples)
    return StageChain(
        sizes=tuple(samples.index(one) for one in micro_batches),
        forward=seconds[..., 0],
        input_gradient=seconds[..., 1],
        weight_gradient=seconds[..., 2],
        update=np.array([curve.layer_seconds(max(1, whole))[1] * of_unit for curve in curves]),
        crossing_bytes=np.array([[one.crossing_bytes(size) for one in units] for size in samples]),
        **_links(network),
        state_bytes=tensors * (owners @ np.array([one.parameter_bytes for one in layers])),
        kept_bytes=owners @ np.array([one.kept_bytes(largest) for one in layers]),
        room_bytes=np.array(room_bytes, dtype=float),
        alike=_alike(curves, network, room_bytes),
        own=StageCost.of(passes, curves),
        layers=owners.sum(axis=1),
    )


def _links(network: RankNetwork) -> dict[str, Any]:
    """Latency and seconds for a byte of a message from each rank to each other."""
    import numpy as np

    count = len(network.machines)
    latency, rate = np.zeros((count, count)), np.zeros((count, count))
    known: dict[tuple[str, str], tuple[float, float]] = {}
    for one in range(count):
        for other in range(count):
            if one == other:
                continue
            key = (network.machines[one], network.machines[other])
            if key not in known:
                pair = network.among((one, other))
                none, many = (
                    pair.seconds(Moved(pairs=np.array([[0.0, size], [0.0, 0.0]])))
                    for size in (0.0, 1e9)
                )
                known[key] = none, (many - none) / 1e9
            latency[one, other], rate[one, other] = known[key]
    return {"latency_s": latency, "s_per_byte": rate}


def _alike(
    curves: Sequence[DeviceCurve], network: RankNetwork, room_bytes: Sequence[float]
) -> tuple[int, ...]:
    """Numbers of kinds: devices of one curve and memory whose links are the same.

    Devices that are alone on their machines are alike if their links are.
    """
    machines = network.machines
    numbers: dict[object, int] = {}
    found = []
    for curve, machine, room in zip(curves, machines, room_bytes, strict=True):
        alone = machines.count(machine) == 1
        where: object = repr(network.between.get(machine)) if alone else machine
        found.append(numbers.setdefault((id(curve), room, alone, where), len(numbers)))
    return tuple(found)
