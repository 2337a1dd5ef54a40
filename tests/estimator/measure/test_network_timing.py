"""Measuring a network: the timed operations are those of its traced step."""

from __future__ import annotations

import math
import random
import time
from collections import Counter

import pytest
import torch

from trainwright.estimator.measure.network_timing import measure_network, ready, time_steps
from trainwright.estimator.measure.networks.benchmark import FAMILIES, BenchmarkNetwork, networks
from trainwright.estimator.measure.sentinel import Sentinel
from trainwright.estimator.measure.torch_device import OperationClock
from trainwright.estimator.predict.calibration import op_count
from trainwright.estimator.trace.recorder import OperationRecorder
from trainwright.estimator.trace.source import ModelDefinition
from trainwright.estimator.trace.trace import trace
from trainwright.estimator.trace.training_step import TrainingStepSpec


def _network(optimizer: str) -> BenchmarkNetwork:
    return next(
        one
        for one in networks(3)
        if one.family == "dense" and one.optimizer == optimizer and one.batch_size < 64
    )


def test_a_sample_has_the_operations_of_the_traced_step() -> None:
    for optimizer in ("sgd", "adam"):
        network = _network(optimizer)
        torch.manual_seed(0)
        sample = measure_network(network, Sentinel())
        definition = ModelDefinition(network.build, network.example_batch, network.loss)
        traced = trace(
            TrainingStepSpec(definition, {}, None, {"name": optimizer}), sample.batch_size
        )
        kinds, seen = Counter[str](), Counter[str]()
        for one in traced.trace:
            kinds[one.kind] += one.count
        for each in sample.ops:
            seen[each.kind] += each.count
        assert seen == kinds
        assert seen.total() == op_count(traced)
        assert all(one.seconds > 0 for one in sample.ops)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_measured_operations_have_the_sizes_of_traced_ones(
    family: str,
) -> None:
    build, inputs = FAMILIES[family](random.Random(1))
    network = BenchmarkNetwork(family, build, inputs, 2, "adamw")
    step, recorder = ready(network, 2), OperationRecorder()
    step()
    with recorder, recorder.record() as recording:
        step()
    measured = Counter(
        (
            one.kind,
            one.family,
            one.dtype,
            round(one.flops),
            round(one.bytes),
            tuple(one.dims.items()),
        )
        for one in recording.operations
        if one.kind != "aten._local_scalar_dense"
    )
    definition = ModelDefinition(build, network.example_batch, network.loss)
    traced = Counter[tuple[object, ...]]()
    for each in trace(TrainingStepSpec(definition, {}, None, {"name": "adamw"}), 2).trace:
        dims = tuple((name, float(round(line(2), 6))) for name, line in each.dims.items())
        traced[
            each.kind, each.family, each.dtype, round(each.flops(2)), round(each.bytes(2)), dims
        ] += each.count
    assert measured == traced


def test_the_clock_times_the_recorded_operations_and_returns_each_time_once() -> None:
    x = torch.rand(4, 4)

    def step() -> None:
        (x @ x).view(16).sum()

    recorder, clock = OperationRecorder(), OperationClock()
    with recorder, recorder.record() as recording:
        step()
    for _ in range(2):
        with clock:
            step()
        assert len(clock.seconds()) == len(recording.operations) == 3
    assert clock.seconds() == []


def test_a_single_layers_step_is_not_timed_as_a_whole() -> None:
    network = next(one for one in networks(3) if one.single and one.batch_size < 16)
    sample = measure_network(network, Sentinel())
    assert sample.single
    assert sample.seconds == sum(one.count * one.seconds for one in sample.ops)
    assert (sample.noise, sample.speed) == (0.0, sample.ops_speed)


def test_a_long_step_is_timed_once_and_a_short_one_many_times() -> None:
    calls = Counter[str]()

    def long() -> None:
        calls["long"] += 1
        time.sleep(0.03)

    def short() -> None:
        calls["short"] += 1

    assert time_steps(long) >= 0.03
    assert time_steps(short, least_s=math.inf) >= 0
    assert calls == {"long": 1, "short": 50}


def test_a_step_of_a_built_model_has_a_new_optimizer() -> None:
    network = _network("adam")
    model = network.build()
    first = ready(network, 2, model)
    first()
    second = ready(network, 4, model)
    assert second.model is first.model
    assert first.optimizer.state
    assert not second.optimizer.state
