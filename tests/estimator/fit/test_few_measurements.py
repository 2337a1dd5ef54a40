"""Calibrations of few measurements. The steps have known costs, which the fit must find."""

from __future__ import annotations

import importlib.metadata
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.estimator.curves import Affine
from trainwright.estimator.devices import DEVICE_TYPES
from trainwright.estimator.fit.step_fit import StepSample, fit
from trainwright.estimator.predict.calibration import Calibration, load, save
from trainwright.estimator.predict.datasheet import reached
from trainwright.estimator.predict.machine_speed import Speed
from trainwright.estimator.predict.op_cost import OpSample
from trainwright.estimator.predict.step_time import estimate_step, predict_curve
from trainwright.estimator.structure import Operation, Structure

SPEED = Speed(compute_s=1.0, memory_s=1.0, calls_s=1.0)
MEASURED = ("matmul", "conv", "elementwise", "view")


def _op(draw: random.Random, device_type: str, family: str, slower: float) -> OpSample:
    """An operation that takes `slower` times the datasheet's time."""
    sheet = reached(DEVICE_TYPES[device_type], family)
    size = 10 ** draw.uniform(-5, -2)  # seconds of work at the device's rates
    flops = size * sheet.flops_per_s if family in ("matmul", "conv") else 0.0
    moved = 0.0 if flops or family == "view" else size * sheet.bytes_per_s
    return OpSample(
        kind=f"aten.{family}",
        family=family,
        dtype="float32",
        flops=flops,
        bytes=moved,
        dims={},
        count=3,
        seconds=slower * float(sheet(flops, moved)),
    )


def _steps(device_type: str, slower: float, noise: float = 0.0) -> list[StepSample]:
    draw, made = random.Random(1), []
    for number in range(12):
        ops = tuple(_op(draw, device_type, family, slower) for family in MEASURED)
        seconds = sum(one.count * one.seconds for one in ops)
        made.append(
            StepSample(
                family=f"f{number % 4}",
                batch_size=8,
                seconds=seconds * (1 + noise * (-1) ** (number // 2)),
                speed=SPEED,
                ops_speed=SPEED,
                ops=ops,
            )
        )
    return made


def calibration(device_type: str = "cpu", slower: float = 1.0, noise: float = 0.0) -> Calibration:
    return fit(
        _steps(device_type, slower, noise),
        mode="few-shot",
        device_type=device_type,
        threads=1,
        dtype="float32",
        torch=importlib.metadata.version("torch"),
        processor="made up",
        created_at="2026-01-01T00:00:00+00:00",
        duration_s=1.0,
    )


def structure(*families: str, precision: str = "fp32", dtype: str = "float32") -> Structure:
    none = Affine(fixed=0, per_sample=0)
    return Structure(
        batch_size=32,
        optimizer="adamw",
        precision=precision,
        method="fake tensors",
        parameters=10,
        parameter_bytes=40,
        forward_flops_per_sample=1.0,
        activation_bytes_per_sample=100,
        peak_memory_bytes=Affine(fixed=1000, per_sample=10),
        layers=[],
        features={},
        operations={},
        trace=[
            Operation(
                kind=f"aten.{family}",
                family=family,
                dtype=dtype,
                count=10,
                flops=Affine(fixed=0, per_sample=1e7) if family in ("matmul", "conv") else none,
                bytes=Affine(fixed=1e4, per_sample=1e5),
                dims={"given": Affine(fixed=0, per_sample=1e3)},
            )
            for family in families
        ],
    )


@settings(deadline=None, max_examples=8)
@given(
    slower=st.floats(0.25, 4.0),
    device_type=st.sampled_from(["cpu", "nvidia-m40-12gb", "amd-mi300x"]),
)
def test_the_fit_finds_how_much_slower_or_faster_a_device_is_than_its_datasheet(
    slower: float, device_type: str
) -> None:
    found = calibration(device_type, slower)
    step = structure("matmul", "conv", "elementwise")
    sheet = predict_curve(step, None, device_type=device_type).step_time(32).median
    few = predict_curve(step, found, device_type=device_type)
    assert few.mode == found.mode == "few-shot"
    assert few.step_time(32).median == pytest.approx(slower * sheet, rel=0.5)
    assert found.cross_validated_error.median <= found.cross_validated_error.p90


def test_unmeasured_families_follow_the_devices_general_speed() -> None:
    slow = calibration(slower=3.0)
    step = structure("norm", "index")
    sheet = predict_curve(step, None, device_type="cpu").step_time(32).median
    curve = predict_curve(step, slow, device_type="cpu", cores=1.0)
    assert 1.5 * sheet < curve.step_time(32).median <= 3.1 * sheet
    assert (curve.coverage, curve.unknown) == (0.0, ("aten.index", "aten.norm"))


def test_the_interval_widens_with_the_scatter_of_steps_and_with_unmeasured_operations() -> None:
    calm, noisy = calibration(noise=0.05), calibration(noise=0.6)
    ends = [
        (found.low_factor, found.high_factor)
        for found in (one.uncertainty(structure("conv"), 32) for one in (noisy, calm))
    ]
    assert 0 < ends[0][0] < ends[1][0] < 1 < ends[1][1] < ends[0][1]
    known, strange = (
        predict_curve(structure(*families), calm, device_type="cpu", cores=1.0)
        for families in (("conv",), ("norm",))
    )
    sheet = predict_curve(structure("conv"), None, device_type="cpu")
    assert known.high_factor < strange.high_factor
    assert known.high_factor < sheet.high_factor


def test_half_precision_costs_as_the_datasheet_says() -> None:
    found = calibration("nvidia-h100-80gb")
    large = (
        structure("matmul").trace[0].model_copy(update={"flops": Affine(fixed=0, per_sample=1e12)})
    )
    full = structure("matmul").model_copy(update={"trace": [large]})
    half = structure("matmul", precision="bf16").model_copy(
        update={"trace": [large.model_copy(update={"dtype": "bfloat16"})]}
    )
    times = [found.step_times_s(one, [32])[0] for one in (full, half)]
    assert times[0] / times[1] == pytest.approx(989 / 67, rel=0.05)


def test_a_few_shot_calibration_can_be_stored_and_an_estimate_names_its_mode(
    tmp_path: Path,
) -> None:
    found = calibration()
    save(found, tmp_path / "few.json")
    assert load(tmp_path / "few.json") == found
    curve = predict_curve(structure("conv"), found, device_type="cpu", cores=1.0)
    document = estimate_step(curve, 32)
    assert document["mode"] == "few-shot"
    assert document["coverage"] == 1.0


def test_measurements_without_a_whole_step_are_refused() -> None:
    singles = [one.model_copy(update={"single": True}) for one in _steps("cpu", 1.0)]
    with pytest.raises(ValueError, match="steps: got none of a whole network"):
        fit(singles, device_type="cpu", threads=1)
