"""Fitting and keeping a calibration. The measurements are made up of known costs, so that the fit must find them."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from trainwright.estimator.calibration import (
    Calibration,
    OpCost,
    OpMeasurement,
    StepMeasurement,
    fit,
    fit_op,
    load,
    op_count,
    op_time_s,
    save,
)
from trainwright.estimator.curves import Affine
from trainwright.estimator.errors import BadInput
from trainwright.estimator.structure import Operation, Structure

COSTS = {
    "conv": OpCost(latency_s=2e-5, flops_per_s=1e11, bytes_per_s=1e10),
    "elementwise": OpCost(latency_s=1e-6, flops_per_s=1e15, bytes_per_s=2e10),
}
SCALE, PER_OP_S = 1.2, 5e-6


def _structure(convolutions: int, flops: float, elementwise: int = 40) -> Structure:
    none = Affine(fixed=0, per_sample=0)
    return Structure(
        batch_size=32, optimizer="adamw", precision="fp32", method="fake tensors", parameters=10, parameter_bytes=40,
        forward_flops_per_sample=flops, activation_bytes_per_sample=100,
        peak_memory_bytes=Affine(fixed=1000, per_sample=10), layers=[], features={}, operations={},
        trace=[
            Operation(
                kind="aten.convolution", family="conv", count=convolutions, flops=Affine(fixed=0, per_sample=flops),
                bytes=Affine(fixed=1e4, per_sample=1e3),
            ),
            Operation(
                kind="aten.add", family="elementwise", count=elementwise, flops=none,
                bytes=Affine(fixed=1e5, per_sample=0),
            ),
        ],
    )  # fmt: skip


def _ops() -> list[OpMeasurement]:
    made = []
    for family, cost in COSTS.items():
        for power in range(12):
            for flops, moved in ((10.0 ** (power * 0.7), 1e3), (1e3, 10.0 ** (power * 0.7))):
                flops = flops if family == "conv" else 0.0
                made.append(OpMeasurement(family=family, flops=flops, bytes=moved, seconds=cost(flops, moved)))
    return made


def _steps(noise: float = 0.0) -> list[StepMeasurement]:
    draw, made = random.Random(1), []
    for convolutions in (1, 2, 4, 8):
        for flops in (1e4, 1e6, 1e7):
            structure = _structure(convolutions, flops, elementwise=20 * convolutions)
            seconds = SCALE * op_time_s(COSTS, structure, 32) + PER_OP_S * op_count(structure)
            seconds *= 1 + noise * draw.uniform(-1, 1)
            made.append(
                StepMeasurement(family=f"conv{convolutions}", batch_size=32, structure=structure, seconds=seconds)
            )
    return made


def _calibration(noise: float = 0.0, sentinel_drift: float = 0.02) -> Calibration:
    return fit(
        _ops(), _steps(noise), sentinel_drift=sentinel_drift, device_type="cpu", threads=1, dtype="fp32", torch="2.0.0",
        processor="made up", created_at="2026-01-01T00:00:00+00:00", duration_s=1.0,
    )  # fmt: skip


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    return _calibration()


@pytest.mark.parametrize("family", sorted(COSTS))
def test_the_fit_of_a_family_finds_the_costs_it_was_measured_with(family: str) -> None:
    measured = [one for one in _ops() if one.family == family]
    found = fit_op(measured)
    for one in measured:
        assert found(one.flops, one.bytes) == pytest.approx(one.seconds, rel=0.05)


def test_a_family_that_was_measured_without_flops_is_never_bound_by_them() -> None:
    found = fit_op([one for one in _ops() if one.family == "elementwise"])
    assert found(1e9, 1e6) == pytest.approx(found(0, 1e6))


def test_drift_of_the_machine_widens_the_interval() -> None:
    calm, restless = _calibration(), _calibration(sentinel_drift=0.5)
    assert restless.high_factor == pytest.approx(calm.high_factor * 1.5 / 1.02)
    assert restless.low_factor == pytest.approx(calm.low_factor * 1.02 / 1.5)


def test_a_step_that_was_not_measured_is_predicted(calibration: Calibration) -> None:
    structure = _structure(3, 3e6)
    truth = SCALE * op_time_s(COSTS, structure, 100) + PER_OP_S * op_count(structure)
    assert calibration.step_time_s(structure, 100) == pytest.approx(truth, rel=0.05)
    assert calibration.measurements == len(_ops()) + len(_steps())


def test_the_error_and_the_interval_are_those_of_networks_left_out(calibration: Calibration) -> None:
    assert calibration.cross_validated_error.p90 < 0.03
    assert 0.95 < calibration.low_factor <= 1 <= calibration.high_factor < 1.05
    noisy = _calibration(noise=0.4)
    assert noisy.cross_validated_error.median > 0.05
    assert noisy.high_factor - noisy.low_factor > 0.3


def test_operations_that_were_never_measured_lower_the_coverage(calibration: Calibration) -> None:
    known = _structure(3, 3e6)
    unknown = known.model_copy(
        update={"trace": [*known.trace, known.trace[1].model_copy(update={"family": "other", "count": 400})]}
    )
    assert calibration.coverage(known, 32) == 1.0
    assert 0.0 < calibration.coverage(unknown, 32) < 0.9
    assert calibration.step_time_s(unknown, 32) > calibration.step_time_s(known, 32)


def test_a_calibration_is_read_back_as_it_was_written(calibration: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "sub" / "cpu.json"
    save(calibration, path)
    assert load(path, "2.0.0") == calibration
    assert [one.name for one in path.parent.iterdir()] == ["cpu.json"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "no such file"),
        ("", "cut short"),
        ("[]", "schema version"),
        ('{"schema_version": 1', "cut short"),
        ('{"schema_version": 1}', "not a calibration"),
        ('{"schema_version": 99}', "schema version 99"),
        (b"\xff\xfe\x00", "no such file that can be read"),
    ],
)
def test_a_file_that_is_no_calibration_gives_one_line(content: str | bytes | None, says: str, tmp_path: Path) -> None:
    path = tmp_path / "cpu.json"
    if isinstance(content, str):
        path.write_text(content)
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(BadInput, match=says) as raised:
        load(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_calibration_cut_anywhere_is_refused(calibration: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "cpu.json"
    save(calibration, path)
    whole = path.read_text()
    for part in range(1, 10):
        path.write_text(whole[: len(whole) * part // 10])
        with pytest.raises(BadInput):
            load(path)


def test_a_calibration_of_another_torch_is_refused_where_one_is_asked_for(
    calibration: Calibration, tmp_path: Path
) -> None:
    path = tmp_path / "cpu.json"
    save(calibration, path)
    with pytest.raises(BadInput, match=r"made with torch 2\.0\.0, here is 2\.1\.0"):
        load(path, "2.1.0")


def test_predicting_loads_no_torch(calibration: Calibration, tmp_path: Path) -> None:
    save(calibration, tmp_path / "cpu.json")
    (tmp_path / "structure.json").write_text(_structure(2, 1e6).model_dump_json())
    code = """
import sys
from pathlib import Path
from trainwright.estimator.calibration import load
from trainwright.estimator.step_time import predict_curve
from trainwright.estimator.structure import Structure
folder = Path(sys.argv[1])
structure = Structure.model_validate_json((folder / "structure.json").read_bytes())
assert predict_curve(structure, load(folder / "cpu.json"), device_type="cpu", cores=1.0).mode == "calibrated"
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
