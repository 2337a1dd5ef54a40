"""Emulated devices in layouts: a rank sleeps for what the simulator says that it computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from layout_ranks import layers_of, train_in_threads, with_layout
from training_case import request

from trainwright.estimator.curves import Affine, DeviceCurve, Knots, LayerCost
from trainwright.estimator.devices import EMULATED_SAMPLE_S
from trainwright.estimator.predict.communication import Link
from trainwright.tasks.allocate.layouts.network import RankNetwork
from trainwright.tasks.allocate.layouts.step_simulator import StepSimulator
from trainwright.tasks.runs.artefacts.layout import Pipeline

SPEEDS = (4e5, 1e5)
BATCHES = (40, 20)
LAYOUTS: dict[str, dict[str, Any]] = {
    "data-parallel": {"sync": {}},
    "late-multiply": {"sync": {"out": "factors"}},
    "sharded": {"sync": {"out": "rows"}, "rows": {"out": [7, 3]}},
    "averaging": {"sync": {}, "average_every": 2},
}


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


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_takes_the_emulated_time_that_the_simulator_predicts(
    tmp_path: Path, name: str, accumulation: int
) -> None:
    asked = request(
        tmp_path,
        list(BATCHES),
        validation_fraction=1737 / 1797,
        devices=[{"type": "emulated", "speed": speed} for speed in SPEEDS],
    )
    facts = layers_of(asked)
    costs = emulated_costs([one.name for one in facts])
    asked = with_layout(asked, **LAYOUTS[name])
    layout = asked.plan.layout
    assert layout is not None
    plan = asked.plan.model_copy(
        update={"emulated_layers": costs, "accumulation": accumulation, "steps_per_epoch": 1}
    )
    asked = asked.model_copy(update={"plan": plan})
    found = train_in_threads(asked, tmp_path / "store", lambda rank: rank.emulated_s)
    parts = [
        Pipeline(micro_batches=[batch // accumulation] * accumulation, stages=one.stages)
        for batch, one in zip(BATCHES, layout.pipelines, strict=True)
    ]
    link = {"here": Link(bandwidth_bytes_per_s=1e9, latency_s=1e-5, spread=0.0)}
    simulated = StepSimulator(
        facts, [curve(costs, speed) for speed in SPEEDS], RankNetwork(("here",) * 2, link, link)
    )(layout.model_copy(update={"pipelines": parts}))
    for rank, seconds in enumerate(found):
        assert seconds == pytest.approx(simulated.seconds(rank)["compute"], rel=1e-9)
