"""The roofline of a family: its prior is the datasheet, and many samples outweigh it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.estimator.devices import DEVICE_TYPES
from trainwright.estimator.fit.roofline_fit import OWN_WIDTH, DevicePrior, fit_roofline
from trainwright.estimator.predict.datasheet import FAMILIES, reached
from trainwright.estimator.predict.op_cost import OpSample, Roofline

DEVICES = ("cpu", "nvidia-m40-12gb", "amd-mi300x")


def _slower(device_type: str, family: str, factor: float) -> Roofline:
    sheet = reached(DEVICE_TYPES[device_type], family)
    return Roofline(
        latency_s=sheet.latency_s * factor,
        flops_per_s=sheet.flops_per_s / factor,
        bytes_per_s=sheet.bytes_per_s / factor,
    )


def _samples(truth: Roofline, family: str, count: int = 4) -> list[OpSample]:
    """Operations that are bound by latency, then by arithmetic and by memory in turn."""
    made = []
    for number, size in enumerate(np.geomspace(1e-6, 1e-2, count)):
        flops, moved = (size * truth.flops_per_s, 0.0), (0.0, size * truth.bytes_per_s)
        one = (flops, moved)[number % 2]
        made.append(
            OpSample(
                kind=f"aten.{family}",
                family=family,
                dtype="float32",
                flops=one[0],
                bytes=one[1],
                dims={},
                count=1,
                seconds=float(truth(*one)),
            )
        )
    return made


@settings(max_examples=20, deadline=None)
@given(
    latency=st.floats(2e-6, 3e-5), flops_rate=st.floats(1e10, 2e11), bytes_rate=st.floats(1e9, 4e10)
)
def test_many_samples_recover_their_roofline(
    latency: float, flops_rate: float, bytes_rate: float
) -> None:
    truth = Roofline(latency_s=latency, flops_per_s=flops_rate, bytes_per_s=bytes_rate)
    seconds, none = np.geomspace(1e-6, 1e-2, 200), np.zeros(200)
    flops = np.concatenate([seconds * flops_rate, none])
    moved = np.concatenate([none, seconds * bytes_rate])
    seconds = truth(flops, moved)
    found = fit_roofline(flops, moved, seconds, DevicePrior("cpu").center("matmul"))
    assert np.abs(np.log(found(flops, moved) / seconds)).max() < 0.2


def test_without_samples_of_a_rate_the_prior_applies() -> None:
    prior = DevicePrior("cpu")
    sheet = reached(DEVICE_TYPES["cpu"], "elementwise")
    moved = np.geomspace(1e4, 1e9, 12)
    seconds = 1e-6 + moved / 2e9
    found = fit_roofline(np.zeros(12), moved, seconds, prior.center("elementwise"))
    assert found.flops_per_s == pytest.approx(sheet.flops_per_s, rel=0.01)
    assert found.bytes_per_s == pytest.approx(2e9, rel=0.15)


@settings(deadline=None, max_examples=12)
@given(factor=st.floats(0.25, 4.0), device_type=st.sampled_from(DEVICES))
def test_unmeasured_families_move_with_the_measured_ones(factor: float, device_type: str) -> None:
    measured = ("matmul", "conv", "elementwise", "norm", "reduction")
    samples = {name: _samples(_slower(device_type, name, factor), name) for name in measured}
    prior = DevicePrior(device_type).given(samples)
    cost, sheet = prior.unmeasured("pool"), reached(DEVICE_TYPES[device_type], "pool")
    off = abs(np.log(factor))
    for flops, moved, left in ((1e16, 0.0, 0.25), (0.0, 1e14, 0.25), (0.0, 0.0, 0.9)):
        ratio = float(cost.roofline(flops, moved) / sheet(flops, moved))
        assert abs(np.log(ratio / factor)) < 0.02 + left * off


def test_more_samples_of_a_family_reduce_the_weight_of_the_prior() -> None:
    truth, center = _slower("cpu", "matmul", 6.0), DevicePrior("cpu").center("matmul")
    off = []
    for count in (1, 2, 4):
        flops = np.full(count, 1e9)
        found = fit_roofline(flops, np.zeros(count), truth(flops, 0.0), center)
        off.append(abs(np.log(found.flops_per_s / truth.flops_per_s)))
    assert off == sorted(off, reverse=True)
    assert off[-1] < 0.01 < 0.3 < off[0]


def test_an_unmeasured_family_is_as_uncertain_as_its_constants() -> None:
    cost = DevicePrior("nvidia-t4").unmeasured("norm")
    flops, moved = np.array([0.0]), np.array([1e9])
    seconds, deviation = cost.predict(["aten.norm"], flops, moved, np.zeros((1, 2)))
    sheet = reached(DEVICE_TYPES["nvidia-t4"], "norm")
    assert seconds[0] == pytest.approx(float(sheet(0.0, 1e9)))
    assert deviation[0] == OWN_WIDTH


def test_n_threads_reach_n_times_the_rates_of_a_core() -> None:
    for family in FAMILIES:
        one, four = (DevicePrior("cpu", threads).center(family) for threads in (1, 4))
        assert four - one == pytest.approx([0.0, np.log(4), np.log(4)])
    gpu = [DevicePrior("nvidia-t4", threads).center("conv") for threads in (1, 4)]
    assert gpu[0] == pytest.approx(gpu[1])
