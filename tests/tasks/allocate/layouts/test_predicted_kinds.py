"""A simulated step by kind of action."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from layout_cases import LOSS, convolution, dense_layer, layout_of, models_and_layouts
from layout_plans import HEAVY, LIGHT, plan
from simulated_cases import curve_of, network

from trainwright.estimator.structure import LayerFacts
from trainwright.tasks.allocate.actions.step_simulator import SimulatedStep, StepSimulator
from trainwright.tasks.allocate.layouts.averages import AverageTimes
from trainwright.tasks.allocate.layouts.predicted_kinds import by_kind
from trainwright.tasks.runs.artefacts.layout import Layout
from trainwright.tasks.runs.artefacts.plan import Prediction
from trainwright.tasks.runs.artefacts.step_kinds import StepByKind
from trainwright.tasks.units import plain

TIMES = AverageTimes(epoch_steps=25, checkpoint_steps=50, steps=100, moments=2)


def simulated(layers: list[LayerFacts], layout: Layout) -> tuple[SimulatedStep, list[StepByKind]]:
    ranks = len(layout.pipelines)
    curves = [curve_of(layers, 1.0 + rank) for rank in range(ranks)]
    step = StepSimulator(layers, curves, network(ranks, 1e6, 1e-4))(layout)
    return step, by_kind(step, layout, layers, TIMES)


@settings(max_examples=60, deadline=None)
@given(models_and_layouts())
def test_kinds_add_up_to_the_step_of_each_device(case: tuple[list[LayerFacts], Layout]) -> None:
    step, found = simulated(*case)
    assert [one.device for one in found] == case[1].devices
    for rank, one in enumerate(found):
        seconds = step.seconds(rank)
        assert sum(one.compute_s.values()) == pytest.approx(seconds["compute"], abs=1e-12)
        assert sum(one.wait_s.values()) == pytest.approx(seconds["wait"], abs=1e-12)
        assert sum(one.sent_bytes.values()) == pytest.approx(step.sent_bytes[rank])


MODEL = [convolution("conv", 100), dense_layer("fc", 100, 100, bias=False), LOSS]


def test_each_way_to_keep_a_layer_equal_has_kinds_of_its_own() -> None:
    _, (summed, _) = simulated(MODEL, layout_of([[8], [8]]))
    _, (late, _) = simulated(MODEL, layout_of([[8], [8]], {"fc": "factors"}))
    _, (rows, _) = simulated(MODEL, layout_of([[8], [8]], {"fc": "rows"}, {"fc": [50, 50]}))
    assert summed.compute_s["late gradient"] == rows.compute_s["late gradient"] == 0
    assert late.compute_s["late gradient"] == pytest.approx(16e-3)
    assert summed.sent_bytes["transfer"] == 0
    assert late.sent_bytes["transfer"] == 8 * (100 + 100) * 4
    assert late.sent_bytes["sum"] == summed.sent_bytes["sum"] - 100 * 100 * 4
    assert set(summed.wait_s) == {"agree", "sum"}
    assert set(late.wait_s) == {"agree", "sum", "gather"}
    assert set(rows.wait_s) == {"agree", "sum", "exchange"}


def test_averages_at_epochs_and_checkpoints_count_too() -> None:
    each, seldom = (
        simulated(MODEL, layout_of([[8], [8]], average_every=every))[1][0] for every in (1, 10)
    )
    agreed = 1024.0
    # Every 10 steps, after epochs of 25 and at checkpoints every 50: 12 in 100 steps, and both
    # moments twice.
    assert seldom.wait_s["average"] == pytest.approx(each.wait_s["average"] * 12 / 100)
    assert seldom.sent_bytes["sum"] - agreed == pytest.approx(
        (each.sent_bytes["sum"] - agreed) * 16 / 100
    )


@pytest.mark.parametrize("layout", ["averaging", "mixed"])
def test_a_plans_bytes_by_kind_are_those_that_its_words_compare(layout: str) -> None:
    averaged, summed = (
        plan(HEAVY, layout=one, checkpoint={"every_steps": 7}) for one in (layout, "data-parallel")
    )
    assert averaged.predicted is not None
    assert summed.predicted is not None
    ratio = max_sent(summed.predicted) / max_sent(averaged.predicted)
    assert f" {plain(ratio)} times fewer bytes" in averaged.layout_in_words


@pytest.mark.parametrize("layout", ["data-parallel", "late-multiply", "averaging", "mixed"])
@pytest.mark.parametrize("model", [HEAVY, LIGHT])
def test_what_a_device_computes_and_waits_is_the_plans_step_time(
    model: list[LayerFacts], layout: str
) -> None:
    made = plan(model, layout=layout, cores=(1.0, 0.5))
    assert made.predicted is not None
    for one in made.predicted.by_kind:
        seconds = sum(one.compute_s.values()) + sum(one.wait_s.values())
        assert seconds == pytest.approx(made.predicted.step_time_s.median)


def max_sent(predicted: Prediction) -> float:
    return max(sum(one.sent_bytes.values()) for one in predicted.by_kind)
