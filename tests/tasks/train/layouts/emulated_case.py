"""Emulated devices for the tests of layouts: what each layer costs, and a device's curve."""

from __future__ import annotations

from trainwright.estimator.curves import Affine, DeviceCurve, Knots, LayerCost
from trainwright.estimator.devices import EMULATED_SAMPLE_S


def emulated_costs(names: list[str]) -> list[LayerCost]:
    """Costs that differ by layer and phase, EMULATED_SAMPLE_S in all."""
    weights = [
        (name, phase, float(1 + (3 * at + 2 * number) % 7))
        for number, name in enumerate(names)
        for at, phase in enumerate(("forward", "input_gradient", "weight_gradient"))
    ]
    total = sum(weight for _, _, weight in weights)
    lines = {
        (name, phase): Affine(fixed=0.0, per_sample=EMULATED_SAMPLE_S * weight / total)
        for name, phase, weight in weights
    }
    return [
        LayerCost(
            name=name,
            forward=lines[name, "forward"],
            input_gradient=lines[name, "input_gradient"],
            weight_gradient=lines[name, "weight_gradient"],
        )
        for name in names
    ]


def curve(layers: list[LayerCost], speed: float) -> DeviceCurve:
    values = tuple(EMULATED_SAMPLE_S * size / speed for size in (1, 64))
    line = Affine(fixed=0.0, per_sample=EMULATED_SAMPLE_S / speed)
    return DeviceCurve(
        device_type="emulated",
        speed=speed,
        mode="calibrated",
        coverage=1.0,
        step_time_s=line,
        time_knots=Knots(sizes=(1, 64), values=values),
        low_factor=1.0,
        high_factor=1.0,
        peak_memory_bytes=line,
        layers=tuple(layers),
    )
