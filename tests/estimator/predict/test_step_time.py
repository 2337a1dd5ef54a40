"""Curves over the batch size, for every kind of device."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.estimator.curves import Affine
from trainwright.estimator.devices import DEVICE_TYPES, EMULATED, EMULATED_SAMPLE_S
from trainwright.estimator.predict.calibration import Calibration, ErrorSummary, StepCorrection
from trainwright.estimator.predict.energy import PowerDraw
from trainwright.estimator.predict.machine_speed import Speed
from trainwright.estimator.predict.op_cost import FamilyCost, Kernel, Roofline
from trainwright.estimator.predict.step_time import estimate_step, predict_curve
from trainwright.estimator.structure import Operation, Structure

PROMISED = [
    "nvidia-m40-12gb",
    "nvidia-p100-16gb",
    "nvidia-v100-16gb",
    "nvidia-v100-32gb",
    "nvidia-t4",
    "nvidia-a10",
    "nvidia-a100-40gb",
    "nvidia-a100-80gb",
    "nvidia-l4",
    "nvidia-l40s",
    "nvidia-rtx3090",
    "nvidia-rtx4090",
    "nvidia-h100-80gb",
    "nvidia-h200",
    "nvidia-b200",
    "amd-mi300x",
    "cpu",
    "emulated",
]


def _structure(precision: str = "fp32", flops: float = 1e7) -> Structure:
    return Structure(
        batch_size=32,
        optimizer="adamw",
        precision=precision,
        method="fake tensors",
        parameters=1000,
        parameter_bytes=4000,
        forward_flops_per_sample=1e6,
        activation_bytes_per_sample=1e4,
        peak_memory_bytes=Affine(fixed=16_000, per_sample=20_000),
        layers=[],
        features={},
        operations={},
        trace=[
            Operation(
                kind="aten.mm",
                family="matmul",
                count=10,
                flops=Affine(fixed=0, per_sample=flops),
                bytes=Affine(fixed=4000, per_sample=1e4),
                live_bytes=Affine(fixed=16_000, per_sample=20_000),
            ),
            Operation(
                kind="aten.add",
                family="elementwise",
                count=100,
                flops=Affine(fixed=0, per_sample=0),
                bytes=Affine(fixed=4000, per_sample=1e3),
            ),
        ],
    )


def _calibration(threads: int = 1) -> Calibration:
    cost = FamilyCost(
        roofline=Roofline(latency_s=2e-6, flops_per_s=1e11, bytes_per_s=1e10),
        dims=(),
        kernel=Kernel(lengths=(None, None), family_sigma=0.5, kind_sigma=0.5, noise=0.1),
        kinds=("aten.mm",),
        points=((0.0, 0.0),),
        weights=(0.0,),
    )
    return Calibration(
        device_type="cpu",
        threads=threads,
        dtype="float32",
        torch="2.0.0",
        processor="made up",
        created_at="2026-01-01T00:00:00+00:00",
        measurements=3,
        duration_s=1.0,
        sentinel_drift=0.01,
        speed=Speed(compute_s=1e-3, memory_s=1e-3, calls_s=1e-4),
        families={"matmul": cost, "elementwise": cost},
        kinds=("aten.mm", "aten.add"),
        correction=StepCorrection(scale=1.0, per_op_s=5e-6),
        cross_validated_error=ErrorSummary(median=0.1, p90=0.2),
        step_deviation=0.1,
        interval_quantile=2.0,
    )


@pytest.mark.parametrize("name", PROMISED)
def test_every_device_type_has_a_curve(name: str) -> None:
    curve = predict_curve(
        _structure(), None, device_type=name, speed=1.0 if name == EMULATED else None
    )
    time = curve.step_time(64)
    assert 0 < time.low <= time.median <= time.high
    assert curve.step_time(1024).median > time.median
    assert curve.idle_w is not None
    assert curve.load_w is not None
    assert curve.idle_w < curve.load_w
    assert DEVICE_TYPES[name].source


@given(batch_size=st.integers(1, 4096), speed=st.floats(0.1, 10))
def test_an_emulated_devices_time_follows_from_its_speed(batch_size: int, speed: float) -> None:
    curve = predict_curve(_structure(), None, device_type=EMULATED, speed=speed)
    time = curve.step_time(batch_size)
    assert time.median == pytest.approx(EMULATED_SAMPLE_S * batch_size / speed)
    assert time.low == time.median == time.high
    assert (curve.mode, curve.coverage) == ("calibrated", 1.0)


def test_half_a_core_takes_twice_as_long_with_the_same_relative_interval() -> None:
    whole, half = (
        predict_curve(_structure(), _calibration(), device_type="cpu", cores=cores).step_time(64)
        for cores in (1.0, 0.5)
    )
    assert half.median == pytest.approx(2 * whole.median)
    assert half.high / half.median == pytest.approx(whole.high / whole.median)


@pytest.mark.parametrize("cores", [1.5, 1.9])
def test_a_fraction_beyond_whole_cores_does_not_help(cores: float) -> None:
    power = PowerDraw(idle_w=3, load_w=9, source="rapl", spread=0.1)
    for calibration in (None, _calibration().model_copy(update={"power": power})):
        one, more = (
            predict_curve(_structure(), calibration, device_type="cpu", cores=each)
            for each in (1.0, cores)
        )
        assert more.step_time(64) == one.step_time(64)
        assert (more.idle_w, more.load_w) == (one.idle_w, one.load_w)


def test_fewer_cores_than_threads_take_proportionally_longer() -> None:
    both, fewer = (
        predict_curve(_structure(), _calibration(2), device_type="cpu", cores=cores)
        for cores in (2.0, 1.6)
    )
    assert fewer.step_time(64).median == pytest.approx(1.25 * both.step_time(64).median)


def test_a_calibrated_curve_follows_the_calibration_around_the_traced_batch_size() -> None:
    calibration, structure = _calibration(), _structure()
    curve = predict_curve(structure, calibration, device_type="cpu", cores=1.0)
    assert (curve.mode, curve.coverage) == ("calibrated", 1.0)
    about = calibration.uncertainty(structure, structure.batch_size)
    assert (curve.low_factor, curve.high_factor) == (about.low_factor, about.high_factor)
    for batch_size in (8, 32, 64, 256):
        (seconds,) = calibration.step_times_s(structure, [batch_size])
        assert curve.step_time(batch_size).median == pytest.approx(seconds)
        assert curve.step_time_s(batch_size) == pytest.approx(seconds, rel=0.1)


def test_double_precision_takes_longer_than_single_precision() -> None:
    single, double = (
        predict_curve(_structure(precision), _calibration(), device_type="cpu", cores=1.0)
        .step_time(256)
        .median
        for precision in ("fp32", "fp64")
    )
    assert double > 1.5 * single


def test_unknown_operations_widen_the_interval() -> None:
    structure, calibration = _structure(), _calibration()
    other = structure.trace[1].model_copy(
        update={"kind": "aten.fft", "family": "other", "count": 300}
    )
    strange = structure.model_copy(update={"trace": [*structure.trace, other]})
    known = predict_curve(structure, calibration, device_type="cpu", cores=1.0)
    unknown = predict_curve(strange, calibration, device_type="cpu", cores=1.0)
    assert unknown.coverage < known.coverage
    assert (known.unknown, unknown.unknown) == ((), ("aten.fft",))
    assert unknown.low_factor < known.low_factor
    assert unknown.high_factor > known.high_factor


def test_an_unmeasured_device_has_the_mode_datasheet_and_a_wide_interval() -> None:
    curve = predict_curve(_structure(), None, device_type="nvidia-t4")
    assert (curve.mode, curve.coverage) == ("datasheet", 0.0)
    assert curve.high_factor / curve.low_factor > 4


def test_by_datasheet_a_larger_device_is_faster_at_large_work() -> None:
    structure = _structure(flops=1e12)
    times = [
        predict_curve(structure, None, device_type=name).step_time(64).median
        for name in ("nvidia-m40-12gb", "nvidia-v100-16gb", "nvidia-h100-80gb")
    ]
    assert times == sorted(times, reverse=True)
    assert times[0] > 5 * times[-1]


def test_process_and_gradient_buffer_are_added_to_the_steps_memory() -> None:
    structure = _structure()
    curve = predict_curve(structure, _calibration(), device_type="cpu", cores=1.0)
    assert curve.memory_bytes(10) - curve.memory_bytes(0) == pytest.approx(10 * 20_000)
    assert curve.memory_bytes(0) == pytest.approx(16_000)
    assert curve.safe_memory_bytes(10) > curve.peak_memory_bytes(10)
    assert curve.process_bytes >= 350e6 + structure.parameter_bytes
    assert curve.device_memory_bytes(10) == curve.safe_memory_bytes(10) + curve.process_bytes
    assert predict_curve(structure, None, device_type="nvidia-t4").memory_limit_bytes == 16 * 2**30
    assert curve.memory_limit_bytes is None


def test_a_measured_rank_replaces_the_usual_one() -> None:
    measured = _calibration().model_copy(update={"process_bytes": 5e8})
    curve = predict_curve(_structure(), measured, device_type="cpu", cores=1.0)
    assert 5e8 < curve.process_bytes - curve.kept_bytes <= 6e8


def test_a_given_power_overrides_the_datasheet() -> None:
    curve = predict_curve(_structure(), None, device_type="nvidia-t4", power_w=(11.0, 66.0))
    assert (curve.idle_w, curve.load_w) == (11.0, 66.0)


def test_the_estimate_of_a_step_has_the_documented_fields() -> None:
    curve = predict_curve(_structure(), _calibration(), device_type="cpu", cores=1.0)
    document = estimate_step(curve, 64)
    time, energy = document["step_time_s"], document["energy_j"]
    assert document["mode"] == "calibrated"
    assert document["coverage"] == 1.0
    assert time["low"] <= time["median"] <= time["high"]
    assert energy["median"] == pytest.approx(time["median"] * curve.load_w)
    assert document["energy_source"] == "datasheet"
    assert document["peak_memory_bytes"]["expected"] < document["peak_memory_bytes"]["safe"]
