"""The timeline of a planned step: bars of each rank, their titles, and the picture."""

from __future__ import annotations

import itertools
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_cases import LOSS, dense_layer, models_and_layouts
from layout_plans import HEAVY, plan_and_estimate
from pipeline_cases import pipeline_plan_and_estimate

from trainwright.estimator.curves import Affine, DeviceCurve, LayerCost
from trainwright.estimator.predict.communication import Link
from trainwright.estimator.structure import LayerFacts
from trainwright.tasks.allocate.actions.action import COMPUTE
from trainwright.tasks.allocate.actions.network import RankNetwork
from trainwright.tasks.allocate.actions.step_simulator import StepSimulator
from trainwright.tasks.allocate.actions.transfer_sizes import TransferSizes
from trainwright.tasks.allocate.timeline.lanes import compute_lane, shown_ranks, transfer_lane
from trainwright.tasks.allocate.timeline.measured_step import MeasuredStep
from trainwright.tasks.allocate.timeline.simulated_plan import simulated_plan
from trainwright.tasks.allocate.timeline.timeline_svg import timeline_svg
from trainwright.tasks.errors import BadInput
from trainwright.tasks.runs.artefacts.layout import Layout
from trainwright.tasks.runs.artefacts.step_kinds import MeasuredPass, PassKind, StepByKind

SVG = "{http://www.w3.org/2000/svg}"
DEEP = [
    *(dense_layer(f"blocks.{place}.{name}", 64, 64) for place in range(25) for name in "ab"),
    LOSS,
]
"""50 layers."""


def curve_of(layers: list[LayerFacts], speed: float) -> DeviceCurve:
    """1 ms a sample for each phase of each layer."""
    each = Affine(fixed=0.0, per_sample=1e-3 / speed)
    return DeviceCurve(
        device_type="cpu",
        mode="calibrated",
        coverage=1.0,
        step_time_s=Affine(fixed=0.0, per_sample=3e-3 * len(layers) / speed),
        low_factor=1.0,
        high_factor=1.0,
        peak_memory_bytes=Affine(fixed=0.0, per_sample=1.0),
        layers=tuple(
            LayerCost(name=one.name, forward=each, input_gradient=each, weight_gradient=each)
            for one in layers
        ),
        update=Affine(fixed=0.0, per_sample=1e-4),
    )


@settings(max_examples=60, deadline=None)
@given(models_and_layouts(), st.floats(0, 0.3))
def test_bars_of_a_lane_follow_each_other_and_cover_what_was_simulated(
    case: tuple[list[LayerFacts], Layout], share: float
) -> None:
    layers, layout = case
    ranks = len(layout.pipelines)
    machines = tuple(f"machine-{number}" for number in range(ranks))
    link = Link(bandwidth_bytes_per_s=1e6, latency_s=1e-4, spread=0.0)
    network = RankNetwork(machines, dict.fromkeys(machines, link), dict.fromkeys(machines, link))
    curves = [curve_of(layers, 1.0 + number) for number in range(ranks)]
    step = StepSimulator(layers, curves, network)(layout)
    least_s = share * step.step_s
    for rank in range(ranks):
        bars = compute_lane(step, rank, least_s)
        exact = compute_lane(step, rank, 0.0)
        done_s = sum(bar.end_s - bar.begin_s for bar in exact if bar.kind in COMPUTE)
        assert done_s == pytest.approx(step.computed_s[rank], rel=1e-6, abs=1e-12)
        covered_s = sum(bar.end_s - bar.begin_s for bar in exact)
        assert sum(bar.end_s - bar.begin_s for bar in bars) >= covered_s * (1 - 1e-9)
        for before, after in itertools.pairwise(bars):
            assert before.end_s <= after.begin_s + 1e-12
        wire = transfer_lane(step, TransferSizes(layout, layers), rank, 0.0)
        assert len(wire) <= len(step.on_wire)
        assert all(0 <= bar.begin_s < bar.end_s <= step.step_s + 1e-12 for bar in wire)
        if share:
            short = [bar for bar in bars if bar.end_s - bar.begin_s < least_s]
            assert len(bars) <= 2 * (1 + 1 / share)
            assert len(short) <= 1 + len(bars) // 2


def test_titles_name_layer_kind_begin_and_end() -> None:
    simulated = simulated_plan(*plan_and_estimate(HEAVY))
    svg = ElementTree.fromstring(timeline_svg(simulated))
    titles = [one.text or "" for one in svg.iter(f"{SVG}title")]
    for what in (
        "conv: forward, ",
        "fc6: input gradient, ",
        "fc6: gather of factors, 1 MiB sent, ",
        "fc7, conv: sum of gradients, ",
        "fc6: weight gradient, ",
    ):
        found = [one for one in titles if one.startswith(what)]
        assert len(found) == 2, (what, titles)  # one of each rank
        assert all(re.search(r" [\d.,]+ to [\d.,]+ ms$", one) for one in found)
    assert any("wait for sum of gradients" in one for one in titles)
    assert "rank 1: host-1/cpu-0, cpu, 32 samples of a step" in titles


def words(svg: ElementTree.Element) -> list[str]:
    return [one.text or "" for one in svg.iter(f"{SVG}text")]


def test_the_picture_has_an_axis_in_ms_a_legend_and_the_sums_of_each_rank() -> None:
    plan, estimate = plan_and_estimate(HEAVY, hosts=4)
    found = words(ElementTree.fromstring(timeline_svg(simulated_plan(plan, estimate))))
    assert "time since the step began, ms" in found
    assert {"forward", "weight gradient", "gather", "sum of gradients", "wait"} <= set(found)
    assert "exchange" not in found  # the legend has what is drawn
    assert sum(one.startswith("computes ") for one in found) == 4
    assert sum(one.startswith("sends ") for one in found) == 4
    assert any(plan.layout_in_words[:40] in one for one in found)


@pytest.mark.parametrize("hosts", [2, 16])
def test_fifty_layers_are_drawn_within_the_picture_with_few_bars(hosts: int) -> None:
    simulated = simulated_plan(*plan_and_estimate(DEEP, hosts=hosts))
    svg = ElementTree.fromstring(timeline_svg(simulated))
    width, height = float(svg.get("width", 0)), float(svg.get("height", 0))
    bars = list(svg.iter(f"{SVG}rect"))[1:]
    for bar in bars:
        x, y, wide = (float(bar.get(name, 0)) for name in ("x", "y", "width"))
        assert (x >= 0, x + wide <= width, 0 <= y <= height - 12) == (True,) * 3
    assert len(bars) < hosts * 700
    assert [one for one in words(svg) if one.startswith(f"{hosts - 1}: ")]


def test_of_many_ranks_a_stated_selection_is_shown() -> None:
    simulated = simulated_plan(*plan_and_estimate(DEEP, hosts=40, global_batch_size=400))
    ranks = shown_ranks(simulated.step)
    assert len(set(ranks)) == 16
    assert {0, 39} <= set(ranks)
    found = words(ElementTree.fromstring(timeline_svg(simulated)))
    text = " ".join(found)
    assert "16 of 40 ranks, evenly spread from the one that computes least to the one" in text


def test_a_plan_for_one_device_has_only_what_it_computes() -> None:
    simulated = simulated_plan(*plan_and_estimate(HEAVY, hosts=1))
    found = words(ElementTree.fromstring(timeline_svg(simulated)))
    assert "sum of gradients" not in found
    assert "sends 0 B" in found


def test_a_step_that_averages_says_how_often() -> None:
    layout = {"name": "averaging", "average_every": 32}
    simulated = simulated_plan(*plan_and_estimate(HEAVY, layout=layout))
    found = words(ElementTree.fromstring(timeline_svg(simulated)))
    assert "average of parameters" in found
    text = " ".join(found)
    assert "as the mean of all steps. This step ends with an average of parameters, as one" in text
    assert "in 32 does." in text


def test_stages_have_a_bar_for_each_pass_and_their_messages() -> None:
    wanted = {"micro_batches": 4, "schedule": "zero-bubble"}
    plan, estimate = pipeline_plan_and_estimate(layout=wanted, network="1Gbit")
    simulated = simulated_plan(plan, estimate)
    bars = compute_lane(simulated.step, 1, 0.0)
    passes = [(one.kind, one.label) for one in bars if one.kind not in ("wait", "update")]
    order = [
        ("forward", "1"),
        ("input-gradient", "1"),
        ("forward", "2"),
        ("input-gradient", "2"),
        ("weight-gradient", "1"),
        ("forward", "3"),
    ]
    assert passes[:6] == order
    waits = [one.title for one in bars if one.kind == "wait"]
    assert waits[0].startswith("blocks.3: wait for activations of micro-batch 1, 0 to ")
    sent = transfer_lane(simulated.step, simulated.sizes, 1, 0.0)
    messages = [one.title for one in sent if one.kind == "send"]
    assert len(messages) == 4
    assert messages[0].startswith("blocks.3: gradients of micro-batch 1, 156 KiB sent, ")
    found = set(words(ElementTree.fromstring(timeline_svg(simulated))))
    shown = {"forward", "input gradient", "weight gradient", "message to another stage", "wait"}
    assert shown <= found


def test_measured_passes_stages_memory_and_bubbles_are_beside_the_planned_ones() -> None:
    plan, estimate = pipeline_plan_and_estimate(
        layout={"micro_batches": 2, "schedule": "gpipe"}, memory=4e9
    )
    kinds: list[PassKind] = ["forward", "forward", "backward", "backward"]
    stages = {
        device.id: StepByKind(
            device=device.id,
            compute_s={},
            wait_s={},
            sent_bytes={},
            passes=[
                MeasuredPass(
                    kind=kind,
                    micro_batch=number % 2,
                    begin_s=0.1 * (2 * number + rank),
                    end_s=0.1 * (2 * number + rank + 1),
                )
                for number, kind in enumerate(kinds)
            ],
        )
        for rank, device in enumerate(plan.devices)
    }
    measured = MeasuredStep(stages, {plan.devices[0].id: 3e9})
    assert measured.step_s == pytest.approx(0.8)
    assert measured.bubble == pytest.approx(0.5)
    svg = ElementTree.fromstring(timeline_svg(simulated_plan(plan, estimate), measured))
    titles = [one.text or "" for one in svg.iter(f"{SVG}title")]
    assert "measured: micro-batch 2: forward, 200 to 300 ms" in titles
    assert "measured: wait, 100 to 200 ms" in titles
    memory = [one for one in titles if one.startswith("memory: ")]
    assert len(memory) == 2
    assert memory[0].endswith(" planned of 3.73 GiB, 2.79 GiB measured")
    head = " ".join(words(svg))
    assert "Measured: the passes of a step end after 800 ms; devices wait for 50 % of that" in head
    assert re.search(r"Devices wait for [\d.]+ % of it\.", head)


def test_a_training_without_stages_or_a_result_has_no_measured_passes() -> None:
    assert MeasuredStep.of(None) == MeasuredStep()
    assert MeasuredStep().bubble == 0.0


def test_backward_passes_that_are_not_split_are_one_bar() -> None:
    wanted = {"micro_batches": 4, "schedule": "1f1b"}
    simulated = simulated_plan(*pipeline_plan_and_estimate(layout=wanted))
    bars = [one for one in compute_lane(simulated.step, 1, 0.0) if one.kind == "backward"]
    assert [one.label for one in bars] == ["1", "2", "3", "4"]
    assert bars[0].title.startswith("micro-batch 1: gradients of inputs and weights of ")
    assert "gradients of inputs and weights" in words(
        ElementTree.fromstring(timeline_svg(simulated))
    )


def test_a_stored_plan_gives_the_step_that_was_predicted() -> None:
    plan, estimate = plan_and_estimate(HEAVY)
    again = type(plan).model_validate_json(plan.model_dump_json())
    simulated = simulated_plan(again, estimate)
    plain, _ = plan_and_estimate(HEAVY, layout="data-parallel")
    before = simulated_plan(plain, estimate)
    assert plan.predicted is not None
    assert plain.predicted is not None
    ratio = plan.predicted.step_time_s.median / plain.predicted.step_time_s.median
    # Sending copies again, every so many steps, takes at most 1 % of the mean step.
    assert 1 <= ratio / (simulated.step.step_s / before.step.step_s) <= 1.01


def test_without_the_layers_costs_or_the_links_there_is_no_timeline() -> None:
    plan, estimate = plan_and_estimate(HEAVY)
    with pytest.raises(BadInput, match="timeline: none, as the estimate does not say what each"):
        simulated_plan(plan, estimate.model_copy(update={"layers": []}))
    with pytest.raises(BadInput, match="the plan does not have the links between its devices"):
        simulated_plan(plan.model_copy(update={"links": {}}), estimate)
