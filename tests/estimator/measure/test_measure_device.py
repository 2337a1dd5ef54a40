"""Measuring this CPU with the smallest budget, and a stand-in for a GPU."""

from __future__ import annotations

import importlib.metadata
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from trainwright.estimator.errors import BadInput, BusyMachine
from trainwright.estimator.measure import measure_device
from trainwright.estimator.measure.measure_device import measure, setting
from trainwright.estimator.measure.network_timing import OutOfTime, measure_network
from trainwright.estimator.measure.networks.benchmark import networks
from trainwright.estimator.measure.samples import KeptSamples
from trainwright.estimator.measure.sentinel import Sentinel
from trainwright.estimator.measure.torch_device import CPU, TorchDevice, device_named
from trainwright.estimator.predict.datasheet import FAMILIES
from trainwright.estimator.trace.operations import describe

MOST_SAMPLES = 512


@dataclass(frozen=True)
class StandIn(TorchDevice):
    """Follows a GPU's code paths with the CPU's tensors, and records the calls."""

    asked: list[str] = field(default_factory=list)

    @property
    def is_gpu(self) -> bool:
        return True

    @property
    def stamp(self) -> Callable[[], Any]:
        return time.perf_counter

    def finish(self) -> None:
        self.asked.append("finish")

    def seconds_between(self, before: Any, after: Any) -> float:
        return float(after - before)

    def largest_batch(self, batch_size: int) -> float:
        return MOST_SAMPLES

    def begin(self) -> None:
        self.asked.append("begin")


def _gpu() -> StandIn:
    return StandIn(torch.device("cpu"), "nvidia-t4", "stand-in")


def test_a_measured_calibration_has_a_cost_for_every_family() -> None:
    said: list[str] = []
    found = measure(CPU, 0.1, 1, lambda message, _: said.append(message))
    assert (found.mode, found.device_type, found.threads) == ("calibrated", "cpu", 1)
    assert found.torch == importlib.metadata.version("torch")
    assert found.measurements > 50
    assert found.step_deviation > 0
    assert found.sentinel_drift >= 0
    assert found.first_touch_s_per_byte > 0
    assert set(found.families) >= set(FAMILIES)
    assert said[-1].startswith("fitting ")


def test_a_busy_machine_is_measured_no_longer_than_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second network does not begin, although most families were not measured."""
    monkeypatch.setattr(measure_device, "_EACH_ONCE_S", 0.0)
    said: list[str] = []
    found = measure(CPU, 1e-6, 1, lambda message, _: said.append(message))
    assert [line for line in said if line.endswith("networks")] == ["1 networks"]
    assert set(found.families) >= set(FAMILIES)
    with pytest.raises(OutOfTime):
        measure_network(next(networks(0)), Sentinel(), until=time.monotonic() - 1)


def test_a_gpu_is_measured_by_the_same_program_without_the_cpus_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measure_device, "_EACH_ONCE_S", math.inf)  # however busy this machine is
    gpu = _gpu()
    found = measure(gpu, 0.1, 1, lambda *_: None)
    assert (found.device_type, found.processor) == ("nvidia-t4", "stand-in")
    assert found.reference is None
    assert found.first_touch_s_per_byte == 0.0
    assert set(found.families) >= set(FAMILIES)
    assert gpu.asked.count("begin") == 12
    assert gpu.asked.count("finish") > 100


def test_a_gpus_batches_are_larger_and_fit_into_its_memory() -> None:
    gpu = _gpu()
    sentinel = Sentinel(gpu)
    for number, (small, large) in enumerate(zip(networks(5), networks(5, (64,)), strict=False)):
        assert large.batch_size == 64 * small.batch_size
        assert large.family == small.family
        sample = measure_network(large, sentinel, gpu)
        assert min(large.batch_size, 2) <= sample.batch_size <= MOST_SAMPLES
        if number == 2:
            break


def test_samples_of_different_devices_threads_or_seeds_are_not_combined() -> None:
    assert len({setting(CPU, 1), setting(CPU, 2), setting(CPU, 1, 7), setting(_gpu(), 1)}) == 4


def test_a_machine_whose_speed_varies_too_much_is_refused() -> None:
    with pytest.raises(BusyMachine, match=r"allowed: 0 %.*--most-drift"):
        measure(CPU, 0.1, 1, lambda *_: None, most_drift=0.0)


def test_a_measurement_continues_from_its_stored_samples(tmp_path: Path) -> None:
    said: list[str] = []
    first = KeptSamples(tmp_path / "samples", setting(CPU, 1))
    measure(CPU, 0.1, 1, lambda *_: None, kept=first)
    again = KeptSamples(tmp_path / "samples", setting(CPU, 1))
    found = measure(CPU, 0.1, 1, lambda message, _: said.append(message), kept=again)
    assert said[0] == "continuing after 12 networks"
    assert again.samples == first.samples
    assert found.duration_s > first.elapsed_s


@pytest.mark.parametrize("device", ["cuda:99", "tpu", "cuda", ""])
def test_an_unknown_device_is_refused_with_the_available_ones(device: str) -> None:
    with pytest.raises(BadInput, match=f"--device: got '{device}'; torch finds here: cpu"):
        device_named(device)


def test_cudnns_recurrent_layers_count_all_their_weights_for_every_step() -> None:
    steps, batch, inputs, hidden = 5, 3, 16, 8
    weights = [torch.rand(4 * hidden, inputs), torch.rand(4 * hidden, hidden), torch.rand(32)]
    states = [torch.zeros(1, batch, hidden) for _ in range(2)]
    args = (torch.rand(steps, batch, inputs), weights, 4, None, *states)
    out = (torch.rand(steps, batch, hidden), *(one.clone() for one in states))
    seen = describe(torch.ops.aten._cudnn_rnn.default, args, {}, out)
    assert seen.family == "rnn"
    assert seen.flops == 2 * steps * batch * 4 * hidden * (inputs + hidden)
    assert not math.isnan(seen.bytes)
