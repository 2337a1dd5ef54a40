"""Emulated devices in layouts: a rank sleeps for what the simulator says that it computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from emulated_case import curve, emulated_costs
from layout_ranks import layers_of, train_in_threads, with_layout
from training_case import request

from trainwright.estimator.predict.communication import Link
from trainwright.tasks.allocate.actions.network import RankNetwork
from trainwright.tasks.allocate.actions.step_simulator import StepSimulator
from trainwright.tasks.runs.artefacts.layout import Pipeline

SPEEDS = (4e5, 1e5)
BATCHES = (40, 20)
LAYOUTS: dict[str, dict[str, Any]] = {
    "data-parallel": {"sync": {}},
    "late-multiply": {"sync": {"out": "factors"}},
    "sharded": {"sync": {"out": "rows"}, "rows": {"out": [7, 3]}},
    "averaging": {"sync": {}, "average_every": 2},
}


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
