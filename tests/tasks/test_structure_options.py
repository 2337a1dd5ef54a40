"""`trainwright estimate structure.json`: options that disagree with the file are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trainwright.estimator.curves import Affine
from trainwright.estimator.structure import Operation, Structure
from trainwright.tasks.cli import app

ESTIMATE = ["--batch-size", "8", "--device-type", "nvidia-t4", "--json"]


@pytest.fixture
def file(tmp_path: Path) -> str:
    flops = Affine(fixed=0, per_sample=1e9)
    one = Operation(kind="aten.mm", family="matmul", count=1, flops=flops, bytes=Affine(fixed=1e6, per_sample=1e6))
    structure = Structure(
        batch_size=8, optimizer="sgd", precision="fp32", method="fake tensors", parameters=10, parameter_bytes=40,
        forward_flops_per_sample=1.0, activation_bytes_per_sample=1.0, peak_memory_bytes=Affine(fixed=1, per_sample=1),
        layers=[], features={}, operations={}, trace=[one],
    )  # fmt: skip
    path = tmp_path / "structure.json"
    path.write_text(structure.model_dump_json())
    return str(path)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--optimizer", "adamw"], "--optimizer: got 'adamw'"),
        (["--precision", "bf16"], "--precision: got 'bf16'"),
        (["--config", "width=8"], "--config: got 'width=8'"),
    ],
)
def test_an_option_that_the_file_contradicts_is_bad_input(file: str, options: list[str], says: str) -> None:
    done = CliRunner().invoke(app, ["estimate", file, *ESTIMATE, *options])
    assert done.exit_code != 0
    assert says in str(done.exception) + done.output


def test_an_option_that_the_file_agrees_with_is_taken(file: str) -> None:
    plain, told = (
        CliRunner().invoke(app, ["estimate", file, *ESTIMATE, *options])
        for options in ([], ["--optimizer", "sgd", "--precision", "fp32"])
    )
    assert plain.exit_code == told.exit_code == 0, told.output
    assert json.loads(plain.stdout) == json.loads(told.stdout)
