"""Emulated time, action by action: what a step of a device of this speed takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainwright.estimator.curves import Affine, LayerCost
from trainwright.estimator.devices import EMULATED_SAMPLE_S
from trainwright.tasks.runs.artefacts.layout import Sync
from trainwright.tasks.train.rank.emulated_device import EmulatedDevice


class Clock:
    """A rank's own time, which only passes while it works or sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.naps: list[float] = []

    def own_s(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.now_s += seconds


def cost(name: str, forward: float, inputs: float, weights: float) -> LayerCost:
    def line(seconds: float) -> Affine:
        return Affine(fixed=0.0, per_sample=seconds)

    return LayerCost(
        name=name,
        forward=line(forward),
        input_gradient=line(inputs),
        weight_gradient=line(weights),
    )


def device(
    layers: list[LayerCost], syncs: dict[str, Sync] | None = None, speed: float = 1.0
) -> tuple[EmulatedDevice, Clock]:
    clock = Clock()
    return EmulatedDevice(speed, layers, syncs or {}, clock.own_s, clock.sleep), clock


PAIR = [cost("body", 1.0, 1.0, 1.0), cost("head", 2.0, 2.0, 3.0)]
"""A tenth of a sample's time for each phase of `body`; two, two and three for those of `head`."""


def pass_through(one: EmulatedDevice, samples: int, layers: list[LayerCost]) -> None:
    one.begin_part(samples)
    for layer in layers:
        one.forward(layer.name)
    for layer in reversed(layers):
        one.backward(layer.name)


costs = st.floats(0.0, 5.0)


@given(
    phases=st.lists(st.tuples(costs, costs, costs), max_size=6),
    parts=st.lists(st.integers(0, 300), min_size=1, max_size=4),
    speed=st.floats(0.1, 100),
    work_s=st.floats(0, 0.02),
    rest_s=st.floats(0, 0.02),
)
def test_all_actions_together_take_the_whole_step(
    phases: list[tuple[float, float, float]],
    parts: list[int],
    speed: float,
    work_s: float,
    rest_s: float,
) -> None:
    layers = [cost(f"layer{number}", *one) for number, one in enumerate(phases)]
    one, clock = device(layers, speed=speed)
    one.begin(rest_s)
    for samples in parts:
        clock.now_s += work_s
        pass_through(one, samples, layers)
    by_action = one.due_s
    one.end_passes(sum(parts))
    one.settle()
    whole = EMULATED_SAMPLE_S * sum(parts) / speed
    assert one.due_s == pytest.approx(whole, abs=1e-12)
    if sum(map(sum, phases)) > 1e-6:
        assert by_action == pytest.approx(whole, abs=1e-9)
    # The device's own work and what passed before the step are part of its emulated time.
    assert clock.now_s + rest_s == pytest.approx(max(whole, rest_s + work_s * len(parts)))


def test_a_gradient_leaves_after_its_layers_emulated_backward_pass() -> None:
    one, clock = device(PAIR)
    one.begin(0.0)
    one.begin_part(100)
    one.forward("body")
    one.forward("head")
    assert clock.now_s == pytest.approx(0.03)
    one.backward("head")
    assert clock.now_s == pytest.approx(0.08)
    one.backward("body")
    assert clock.now_s == pytest.approx(0.1)


def test_a_late_weight_gradient_takes_the_time_of_the_joint_batch() -> None:
    one, clock = device(PAIR, {"head": "factors"}, speed=2.0)
    one.begin(0.0)
    pass_through(one, 100, PAIR)
    one.end_passes(100)
    assert clock.now_s == pytest.approx(0.7 * 0.1 / 2)
    one.joint("head", "weight_gradient", 300)
    one.settle()
    assert clock.now_s == pytest.approx((0.7 * 0.1 + 0.3 * 0.3) / 2)


def test_a_sharded_layer_takes_the_time_of_the_held_rows_for_the_joint_batch() -> None:
    one, clock = device(PAIR, {"head": "rows"})
    one.begin(0.0)
    one.begin_part(100)
    one.forward("body")
    one.joint("head", "forward", 300 * 0.25)
    assert clock.now_s == pytest.approx(0.1 * 0.1 + 0.2 * 0.3 * 0.25)
    one.joint("head", "input_gradient", 300 * 0.25)
    one.backward("body")
    one.joint("head", "weight_gradient", 300 * 0.25)
    one.end_passes(100)
    one.settle()
    assert clock.now_s == pytest.approx(0.3 * 0.1 + 0.7 * 0.3 * 0.25)


def test_it_does_not_sleep_for_less_than_the_least_time_before_the_passes_end() -> None:
    one, clock = device([cost(f"layer{number}", 1.0, 1.0, 0.0) for number in range(100)])
    one.begin(0.0)
    one.begin_part(10)
    for number in range(100):
        one.forward(f"layer{number}")
    assert all(nap >= 1e-3 for nap in clock.naps)
    assert len(clock.naps) <= 5
    one.end_passes(10)
    assert clock.now_s == pytest.approx(10 * EMULATED_SAMPLE_S)


def test_a_step_that_was_abandoned_leaves_nothing_to_the_next() -> None:
    one, clock = device(PAIR)
    one.begin(0.0)
    one.begin_part(100)
    one.forward("body")
    one.stop()
    one.forward("head")
    before = clock.now_s
    one.begin(0.0)
    pass_through(one, 10, PAIR)
    one.end_passes(10)
    assert clock.now_s - before == pytest.approx(10 * EMULATED_SAMPLE_S)


class Net(torch.nn.Module):
    """Layers that change their inputs in place, run twice, and give several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(4, 4)
        self.relu = torch.nn.ReLU(inplace=True)
        self.cell = torch.nn.LSTM(4, 4, batch_first=True)
        self.head = torch.nn.Linear(4, 2)

    def forward(self, rows: Any) -> Any:
        rows = self.relu(self.body(rows))
        rows = self.relu(self.body(rows))
        return self.head(self.cell(rows[:, None])[0][:, 0])


def test_hooks_count_each_layer_of_a_model_once_in_each_direction() -> None:
    names = ["body", "relu", "cell", "head"]
    layers = [cost(name, 1.0, 1.0, 2.0) for name in names]
    one, clock = device(layers)
    torch.manual_seed(0)
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    one.watch(model)
    one.begin(0.0)
    rows = torch.randn(8, 4)
    for _ in range(2):
        one.begin_part(8)
        model(rows).sum().backward()
        plain(rows).sum().backward()
    assert one.due_s == pytest.approx(16 * EMULATED_SAMPLE_S)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert a.grad is not None
        assert torch.equal(a.grad, b.grad)
    one.end_passes(16)
    one.settle()
    model(rows).sum().backward()  # as in a validation: no time passes
    assert clock.now_s == pytest.approx(16 * EMULATED_SAMPLE_S)


def test_a_recomputed_layer_takes_the_time_of_its_forward_pass_again() -> None:
    clock = Clock()
    one = EmulatedDevice(1.0, PAIR, {}, clock.own_s, clock.sleep, recomputed=["head"])
    one.begin(0.0)
    one.begin_part(100)
    one.forward("body")
    one.forward("head")
    one.forward_again("body")  # a model may recompute it by itself
    one.forward_again("head")
    assert clock.now_s == pytest.approx(0.05)
    one.backward("head")
    one.backward("body")
    one.end_passes(100)
    one.settle()
    assert clock.now_s == pytest.approx(0.12)
