"""Notes of `trainwright estimate`: causes of the interval, drift, too little memory."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trainwright.estimator.curves import Affine
from trainwright.estimator.machine import processor
from trainwright.estimator.predict.calibration import (
    Calibration,
    ErrorSummary,
    StepCorrection,
    load,
    save,
)
from trainwright.estimator.predict.machine_speed import Speed
from trainwright.estimator.predict.op_cost import FamilyCost, Kernel, Roofline
from trainwright.estimator.structure import Operation, Structure
from trainwright.tasks.cli.main import app
from trainwright.tasks.cli.screens.estimate_screen import doubts

GIB = 2**30
VERSION = importlib.metadata.version("torch")


def _calibration(tmp_path: Path, *, family_sigma: float, drift: float = 0.1) -> list[str]:
    """Write a calibration of a matrix product; the options that name it."""
    path = tmp_path / "cpu.json"
    products = FamilyCost(
        roofline=Roofline(latency_s=1e-5, flops_per_s=1e10, bytes_per_s=1e10),
        dims=(),
        kernel=Kernel(lengths=(1.0, 1.0), family_sigma=family_sigma, kind_sigma=0.0, noise=0.01),
        kinds=("aten.mm",),
        points=((10.0, 10.0),),
        weights=(0.0,),
    )
    made = Calibration(
        device_type="cpu",
        threads=1,
        dtype="float32",
        torch=VERSION,
        processor="made up",
        created_at="2026-01-01T00:00:00+00:00",
        measurements=1,
        duration_s=1.0,
        sentinel_drift=drift,
        speed=Speed(compute_s=1e-3, memory_s=1e-3, calls_s=1e-3),
        families={"matmul": products},
        kinds=("aten.mm",),
        correction=StepCorrection(),
        cross_validated_error=ErrorSummary(median=0.1, p90=0.2),
        step_deviation=0.1,
        interval_quantile=2.0,
    )
    save(made, path)
    return ["--calibration", str(path)]


def _estimated(
    tmp_path: Path, options: list[str], live_bytes: float = 1e6, strange: int = 0
) -> str:
    """The output for a matrix product and `strange` kinds of unmeasured operations."""
    file = tmp_path / "structure.json"
    none = Affine(fixed=0, per_sample=0)
    one = Operation(
        kind="aten.mm",
        family="matmul",
        count=1,
        flops=Affine(fixed=0, per_sample=1e9),
        bytes=Affine(fixed=1e6, per_sample=1e6),
        live_bytes=Affine(fixed=live_bytes, per_sample=0),
    )
    odd = [
        one.model_copy(update={"kind": f"odd.{number}", "family": "other"})
        for number in range(strange)
    ]
    structure = Structure(
        batch_size=8,
        optimizer="sgd",
        precision="fp32",
        method="fake tensors",
        parameters=10,
        parameter_bytes=40,
        forward_flops_per_sample=1.0,
        activation_bytes_per_sample=1.0,
        peak_memory_bytes=none,
        layers=[],
        features={},
        operations={},
        trace=[one, *odd],
    )
    file.write_text(structure.model_dump_json())
    done = CliRunner().invoke(app, ["estimate", str(file), "--batch-size", "8", *options])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_an_interval_caused_by_steps_alone_is_explained(tmp_path: Path) -> None:
    said = _estimated(tmp_path, _calibration(tmp_path, family_sigma=0.01))
    assert "steps differ by 22 % from the sum of their operations\n" in said  # exp(2 · 0.1)
    assert "drift" not in said


def test_an_interval_widened_by_unmeasured_operations_is_explained(
    tmp_path: Path,
) -> None:
    said = _estimated(tmp_path, _calibration(tmp_path, family_sigma=0.5))
    assert (
        "steps differ by 22 % from the sum of their operations; "
        "with operations unlike the measured ones" in said
    )


def test_the_screen_names_the_measured_processor_and_this_one_if_it_differs(tmp_path: Path) -> None:
    options = _calibration(tmp_path, family_sigma=0.01)
    assert f"made up, 1 thread, torch {VERSION}; this machine has {processor()}\n" in _estimated(
        tmp_path, options
    )
    save(
        load(tmp_path / "cpu.json").model_copy(update={"processor": processor()}),
        tmp_path / "cpu.json",
    )
    assert f"{processor()}, 1 thread, torch {VERSION}\n" in _estimated(tmp_path, options)


@pytest.mark.parametrize("sigma", [100.0, 1e-3])
def test_a_very_wide_interval_stays_finite(tmp_path: Path, sigma: float) -> None:
    options = _calibration(tmp_path, family_sigma=sigma)
    save(
        load(tmp_path / "cpu.json").model_copy(update={"interval_quantile": 1e3}),
        tmp_path / "cpu.json",
    )
    assert "step time" in _estimated(tmp_path, options)


@pytest.mark.parametrize(
    ("strange", "names"),
    [
        (2, "odd.0, odd.1\n"),
        (7, "odd.0, odd.1, odd.2, odd.3, odd.4 and 2 more (--json lists all)\n"),
    ],
)
def test_operations_that_calibration_never_measured_are_named(
    tmp_path: Path, strange: int, names: str
) -> None:
    options = _calibration(tmp_path, family_sigma=0.01)
    assert "never measured" not in _estimated(tmp_path, options)
    assert names in _estimated(tmp_path, options, strange=strange)
    document = json.loads(_estimated(tmp_path, [*options, "--json"], strange=strange))
    assert document["unknown_operations"] == [f"odd.{number}" for number in range(strange)]


def test_a_datasheet_estimate_does_not_explain_its_interval(tmp_path: Path) -> None:
    assert "steps differ" not in _estimated(tmp_path, ["--device-type", "nvidia-t4"])


@pytest.mark.parametrize(("runs", "lines"), [(0, 1), (3, 0)])
def test_an_interval_from_finished_runs_is_not_explained_by_calibration(
    runs: int, lines: int, tmp_path: Path
) -> None:
    _estimated(tmp_path, _calibration(tmp_path, family_sigma=0.01))
    structure = Structure.model_validate_json((tmp_path / "structure.json").read_text())
    document = {"learned_from": runs, "batch_size": 8}
    assert len(doubts(load(tmp_path / "cpu.json"), structure, document)) == lines


def test_a_calibration_with_too_much_drift_gives_a_warning(
    tmp_path: Path,
) -> None:
    said = _estimated(tmp_path, _calibration(tmp_path, family_sigma=0.01, drift=4.2))
    assert "420 % during calibration: more than the 300 %" in said


@pytest.mark.parametrize(
    ("options", "live_bytes", "says"),
    [
        (["--device-type", "nvidia-t4"], 40 * GIB, "nvidia-t4 has 16 GiB"),
        (["--device-type", "cpu"], 2**60, "this machine has"),
        (["--device-type", "nvidia-t4"], GIB, None),
        (["--device-type", "cpu"], 2**20, None),
    ],
)
def test_a_step_that_exceeds_the_memory_gives_a_warning(
    options: list[str], live_bytes: float, says: str | None, tmp_path: Path
) -> None:
    said = _estimated(tmp_path, options, live_bytes)
    assert ("does not fit" in said) is (says is not None)
    assert says is None or says in said


def test_the_document_has_the_memory_a_rank_needs_and_the_devices_memory(tmp_path: Path) -> None:
    document = json.loads(_estimated(tmp_path, ["--device-type", "nvidia-t4", "--json"], GIB))
    assert document["memory_limit_bytes"] == 16 * GIB
    assert document["device_memory_bytes"] == pytest.approx(
        document["peak_memory_bytes"]["safe"] + document["process_bytes"]
    )
