"""The predicted step of pipelines: bubbles, messages that overlap computing, sums of replicas."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_cases import curve_of, network
from stage_cases import SCHEDULES, chain, stage_layout, staged_models

from trainwright.estimator.predict.pass_cost import PassCost
from trainwright.estimator.structure import LayerFacts, Unit
from trainwright.tasks.allocate.actions.step_simulator import SimulatedStep, StepSimulator
from trainwright.tasks.runs.artefacts.layout import Layout, StageSchedule

MS = 1e-3


def step_of(
    layers: list[LayerFacts],
    units: list[Unit],
    layout: Layout,
    speeds: list[float] | None = None,
    bytes_per_s: float = 1e15,
) -> SimulatedStep:
    ranks = len(layout.devices)
    curves = [curve_of(layers, speed) for speed in speeds or [1.0] * ranks]
    return StepSimulator(layers, curves, network(ranks, bytes_per_s), units)(layout)


@pytest.mark.parametrize(
    ("schedule", "bubble"), [("gpipe", 3 * 3), ("1f1b", 3 * 3), ("zero-bubble", 3)]
)
def test_like_stages_wait_for_the_bubble_of_their_schedule(
    schedule: StageSchedule, bubble: int
) -> None:
    # Each phase of a stage takes 1 ms; a stage has 8 micro-batches of three phases.
    layers, units = chain(4)
    layout = stage_layout(([1] * 8, [1, 2, 3]), units=units, schedule=schedule)
    step = step_of(layers, units, layout)
    assert step.step_s == pytest.approx((8 * 3 + bubble) * MS, rel=1e-3)
    assert step.computed_s == pytest.approx([24 * MS] * 4)


def test_more_micro_batches_make_the_bubble_smaller() -> None:
    layers, units = chain(4)
    times = [
        step_of(layers, units, stage_layout(([32 // count] * count, [1, 2, 3]), units=units))
        for count in (4, 8, 16, 32)
    ]
    assert [round(one.step_s / MS) for one in times] == [168, 132, 114, 105]


def test_a_message_overlaps_the_next_micro_batch() -> None:
    layers, units = chain(2, crossing=1e7)
    layout = stage_layout(([1] * 4, [1]), units=units, schedule="gpipe")
    # A message takes 1 ms, as a phase does: it delays the first stage's first and last gradients.
    slow = step_of(layers, units, layout, bytes_per_s=1e7 / MS)
    fast = step_of(layers, units, layout)
    assert slow.step_s == pytest.approx(fast.step_s + 2 * MS, rel=0.01)
    assert slow.sent_bytes[0] - 1024 == pytest.approx(4 * 1e7)
    wire = [slow.on_wire[f"activations of pipeline 0 cut 0 micro-batch {part}"] for part in (0, 1)]
    assert wire == [pytest.approx((1 * MS, 2 * MS)), pytest.approx((2 * MS, 3 * MS))]


def test_messages_of_one_direction_wait_for_each_other() -> None:
    layers, units = chain(2, crossing=1e7)
    layout = stage_layout(([1] * 4, [1]), units=units, schedule="gpipe")
    step = step_of(layers, units, layout, bytes_per_s=1e7 / (4 * MS))
    wire = [
        step.on_wire[f"activations of pipeline 0 cut 0 micro-batch {part}"] for part in range(4)
    ]
    assert [round(begin / MS) for begin, _ in wire] == [1, 5, 9, 13]


def test_replicas_sum_the_layers_that_both_hold() -> None:
    layers, units = chain(2, elements=250_000)
    layout = stage_layout(([1] * 4, [1]), ([1] * 4, [1]), units=units)
    # A sum of 1 MB among two ranks takes 1 ms; that of the second stage is done earlier.
    step = step_of(layers, units, layout, bytes_per_s=1e6 / MS)
    alone = step_of(layers, units, stage_layout(([1] * 4, [1]), units=units))
    assert step.step_s == pytest.approx(alone.step_s + 1 * MS, rel=0.01)
    assert step.sent_bytes[0] == pytest.approx(1e6, rel=0.01)


@settings(max_examples=200, deadline=None)
@given(staged_models(), st.floats(1e3, 1e9), st.floats(1.0, 4.0))
def test_a_step_is_no_shorter_than_its_work_and_a_faster_network_makes_it_no_longer(
    case: tuple[list[LayerFacts], list[Unit], Layout], bytes_per_s: float, faster: float
) -> None:
    layers, units, layout = case
    speeds = [1.0 + number for number in range(len(layout.devices))]
    slow, fast = (
        step_of(layers, units, layout, speeds, bandwidth)
        for bandwidth in (bytes_per_s, bytes_per_s * faster)
    )
    assert fast.step_s <= slow.step_s * (1 + 1e-9)
    for rank, compute_s in enumerate(slow.computed_s):
        assert compute_s <= slow.step_s * (1 + 1e-9)
        assert slow.sent_bytes[rank] == pytest.approx(fast.sent_bytes[rank])
        spent = slow.seconds(rank)
        assert spent["compute"] == pytest.approx(compute_s)
        assert spent["compute"] + spent["wait"] <= slow.step_s * (1 + 1e-9)


@given(st.sampled_from(SCHEDULES), st.lists(st.integers(0, 5), min_size=1, max_size=6))
@settings(max_examples=50, deadline=None)
def test_uneven_micro_batches_take_the_time_of_their_samples(
    schedule: StageSchedule, parts: list[int]
) -> None:
    layers, units = chain(3)
    step = step_of(layers, units, stage_layout((parts, [1, 2]), units=units, schedule=schedule))
    # One without samples runs a sample.
    assert step.computed_s == pytest.approx([3 * MS * sum(max(1, one) for one in parts)] * 3)


@pytest.mark.parametrize(
    ("kind", "own_ms", "longer"),
    [("cpu", 0.5, [0.5, 0.5]), ("emulated", 0.5, [0, 0]), ("emulated", 4, [3, 2])],
)
def test_passes_take_the_ranks_own_work_too(kind: str, own_ms: float, longer: list[float]) -> None:
    # A stage has 8 micro-batches, each a forward pass of 1 ms and a backward pass of 2 ms. An
    # emulated device's own work is part of that.
    layers, units = chain(2)
    layout = stage_layout(([1] * 8, [1]), units=units, schedule="gpipe")
    curves = [curve_of(layers, 1.0).model_copy(update={"device_type": kind})] * 2
    cost = PassCost(
        pass_s=own_ms * MS - 1e-4, message_s=1e-4, byte_s=0, delay_s=0, layer_s=0, measured=True
    )
    step = StepSimulator(layers, curves, network(2, 1e15), units, cost)(layout)
    assert step.computed_s == pytest.approx([(24 + 8 * sum(longer)) * MS] * 2)
    assert step.step_s == pytest.approx((27 + 9 * sum(longer)) * MS, rel=1e-2)


def test_a_message_comes_later_by_what_threads_need_to_wake_up() -> None:
    layers, units = chain(2)
    layout = stage_layout(([1], [1]), units=units)
    curves = [curve_of(layers, 1.0)] * 2
    cost = PassCost(pass_s=0, message_s=0, byte_s=0, delay_s=MS, layer_s=0, measured=True)
    late, soon = (
        StepSimulator(layers, curves, network(2, 1e15), units, passes)(layout).step_s
        for passes in (cost, None)
    )
    assert late == pytest.approx(soon + 2 * MS)
