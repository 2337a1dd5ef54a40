"""Devices and networks for the tests of simulated steps."""

from __future__ import annotations

from trainwright.estimator.curves import Affine, DeviceCurve, LayerCost
from trainwright.estimator.predict.communication import Link
from trainwright.estimator.structure import LayerFacts
from trainwright.tasks.allocate.actions.network import RankNetwork

NOTHING = Affine(fixed=0.0, per_sample=0.0)


def per_sample(seconds: float) -> Affine:
    return Affine(fixed=0.0, per_sample=seconds)


def curve_of(layers: list[LayerFacts], speed: float = 1.0) -> DeviceCurve:
    """A device that takes 1 ms a sample for each phase of each layer with parameters."""
    each = per_sample(1e-3 / speed)
    costs = tuple(
        LayerCost(
            name=one.name,
            forward=each if one.parameters else NOTHING,
            input_gradient=each if one.parameters else NOTHING,
            weight_gradient=each if one.parameters else NOTHING,
        )
        for one in layers
    )
    count = sum(bool(one.parameters) for one in layers)
    return DeviceCurve(
        device_type="cpu",
        mode="calibrated",
        coverage=1.0,
        step_time_s=per_sample(3e-3 * max(1, count) / speed),
        low_factor=1.0,
        high_factor=1.0,
        peak_memory_bytes=per_sample(1.0),
        layers=costs,
        update=NOTHING,
    )


def network(ranks: int, bytes_per_s: float, latency_s: float = 0.0) -> RankNetwork:
    """Every rank on a machine of its own."""
    link = Link(bandwidth_bytes_per_s=bytes_per_s, latency_s=latency_s, spread=0.0)
    machines = tuple(f"machine-{number}" for number in range(ranks))
    return RankNetwork(machines, dict.fromkeys(machines, link), dict.fromkeys(machines, link))
