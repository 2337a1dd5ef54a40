"""The predicted step of a layout: times of computation, transfers that overlap, bytes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_cases import LOSS, convolution, dense_layer, layout_of, models_and_layouts
from simulated_cases import curve_of, network

from trainwright.estimator.structure import LayerFacts
from trainwright.tasks.allocate.actions.actions import actions_of
from trainwright.tasks.allocate.actions.step_simulator import StepSimulator, play
from trainwright.tasks.allocate.actions.transfer_sizes import TransferSizes
from trainwright.tasks.runs.artefacts.layout import Layout


def simulator(
    layers: list[LayerFacts], speeds: list[float], bytes_per_s: float = 1e12
) -> StepSimulator:
    curves = [curve_of(layers, speed) for speed in speeds]
    return StepSimulator(layers, curves, network(len(speeds), bytes_per_s))


MODEL = [convolution("conv", 100), dense_layer("fc", 100, 100, bias=False), LOSS]


def test_a_fast_network_leaves_the_slowest_ranks_computation() -> None:
    step = simulator(MODEL, [1.0, 2.0])(layout_of([[8], [8]]))
    assert step.step_s == pytest.approx(8 * 6e-3, rel=1e-3)
    assert step.seconds(0)["compute"] == pytest.approx(8 * 6e-3, rel=1e-3)
    assert step.seconds(1)["wait"] == pytest.approx(8 * 3e-3, rel=1e-2)


def test_a_sum_overlaps_the_backward_pass_of_earlier_layers() -> None:
    # The sum of fc (40 kB) takes as long as the backward pass of conv: 2 ms for one sample.
    slow = simulator(MODEL, [1.0, 1.0], bytes_per_s=40_000 / 2e-3)
    step = slow(layout_of([[1], [1]], chunk_bytes=1 << 20))
    last = layout_of([[1], [1]], chunk_bytes=40_000)
    # In one chunk, nothing overlaps; in two, only the last one is left after the backward pass.
    assert step.step_s == pytest.approx(6e-3 + 2.02e-3, rel=0.03)
    assert slow(last).step_s == pytest.approx(6e-3 + 0.02e-3, rel=0.03)


def test_factors_send_fewer_bytes_and_multiply_the_joint_batch() -> None:
    summed = simulator(MODEL, [1.0, 1.0])(layout_of([[4], [4]]))
    factors = simulator(MODEL, [1.0, 1.0])(layout_of([[4], [4]], {"fc": "factors"}))
    agree = 1024
    assert summed.sent_bytes[0] == pytest.approx(4 * (100 + 100 * 100) + agree)
    assert factors.sent_bytes[0] == pytest.approx(4 * 100 + 4 * 4 * (100 + 100) + agree)
    # 4 samples of 6 ms; the weight gradient of fc is of 8.
    assert factors.step_s == pytest.approx(4 * 6e-3 + 4 * 1e-3, rel=0.01)
    half = layout_of([[4], [4]], {"fc": "factors"}, factor_type="bf16")
    sent = simulator(MODEL, [1.0, 1.0])(half).sent_bytes[0]
    assert sent == pytest.approx(4 * 100 + 2 * 4 * (100 + 100) + agree)


def test_a_rank_that_multiplies_factors_sooner_begins_the_next_step_sooner() -> None:
    # Conv 3 ms and fc 2 ms for each of 4 samples, then the weight gradient of fc for 8; the other
    # rank is twice as fast. What it sends is there before the slow one has come so far.
    layout = layout_of([[4], [4]], {"fc": "factors"})
    step = simulator(MODEL, [1.0, 2.0])(layout)
    slow_s = 4 * 3e-3 + 4 * 2e-3 + 8 * 1e-3
    assert step.step_s == pytest.approx(slow_s, rel=0.01)
    # Its 4 · 4 · 200 bytes take 6 ms, but only the small sum of 1,424 bytes is waited for.
    bytes_per_s = 3200 / 6e-3
    link = simulator(MODEL, [1.0, 2.0], bytes_per_s)(layout)
    assert link.step_s == pytest.approx(slow_s + 1424 / bytes_per_s, rel=0.03)
    begins = [link.spans(rank)[0].begin_s for rank in (0, 1)]
    assert min(begins) == 0
    assert begins[0] > begins[1]


def test_a_sharded_layers_work_follows_the_rows() -> None:
    layout = layout_of([[4], [4]], {"fc": "rows"}, {"fc": [75, 25]})
    step = simulator(MODEL, [1.0, 1.0])(layout)
    # conv: 4 samples of 3 ms; fc: three quarters of 8 samples of 3 ms.
    assert step.step_s == pytest.approx(12e-3 + 18e-3, rel=0.01)
    inputs, outputs = 4 * 4 * 100, 4 * 4 * 75
    gradients, sums = 4 * 4 * 25, 4 * 4 * 100
    sent = 4 * 100 + 1024 + inputs + outputs + gradients + sums
    assert step.sent_bytes[0] == pytest.approx(sent)


@settings(max_examples=100, deadline=None)
@given(models_and_layouts())
def test_lists_that_ranks_play_alone_take_as_long_as_together(
    case: tuple[list[LayerFacts], Layout],
) -> None:
    layers, layout = case
    ranks = len(layout.pipelines)
    curves = [curve_of(layers, 1.0 + number) for number in range(ranks)]
    simulator = StepSimulator(layers, curves, network(ranks, 1e6))
    sizes = TransferSizes(layout, layers)
    lists = [list(one) for one in actions_of(layout, layers)]  # no longer the same list
    apart = play(lists, simulator._seconds(layout), sizes.of, simulator._network)
    together = simulator(layout)
    assert apart.step_s == pytest.approx(together.step_s)
    assert apart.sent_bytes == pytest.approx(together.sent_bytes)
    for rank in range(ranks):
        assert apart.seconds(rank) == pytest.approx(together.seconds(rank))


@settings(max_examples=150, deadline=None)
@given(models_and_layouts(), st.floats(1e3, 1e9), st.floats(1.0, 4.0))
def test_a_step_takes_as_long_as_its_slowest_part_and_no_longer_with_a_faster_network(
    case: tuple[list[LayerFacts], Layout], bytes_per_s: float, faster: float
) -> None:
    layers, layout = case
    ranks = len(layout.pipelines)
    curves = [curve_of(layers, 1.0 + number) for number in range(ranks)]
    slow, fast = (
        StepSimulator(layers, curves, network(ranks, bandwidth))(layout)
        for bandwidth in (bytes_per_s, bytes_per_s * faster)
    )
    assert fast.step_s <= slow.step_s * (1 + 1e-9)
    for rank in range(ranks):
        assert slow.seconds(rank)["compute"] <= slow.step_s * (1 + 1e-9)
        assert slow.sent_bytes[rank] == pytest.approx(fast.sent_bytes[rank])
    if ranks == 1:
        assert slow.sent_bytes == [0.0]


def test_local_steps_take_the_time_of_the_device_that_takes_longest() -> None:
    alone = layout_of([[4, 4], [8], [4, 2]], average_every=4, local_batch=4)
    simulate = simulator(MODEL, [1.0, 2.0, 1.0], bytes_per_s=1e6)
    step = simulate(alone, averages=False)
    assert step.step_s == pytest.approx(8 * 6e-3, rel=0.05)
    assert step.seconds(2)["compute"] == pytest.approx(6 * 6e-3)
    whole = simulate(alone)
    assert whole.sent_bytes[0] - step.sent_bytes[0] == pytest.approx(4 / 3 * 4 * (100 + 100 * 100))
    assert whole.step_s > step.step_s
