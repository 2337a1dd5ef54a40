"""`trainwright estimate structure.json` refuses contradicting options and impossible numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from trainwright.estimator.curves import Affine
from trainwright.estimator.structure import Operation, Structure
from trainwright.tasks.cli.main import app
from trainwright.tasks.cli.screens import console
from trainwright.tasks.errors import BadInput

ESTIMATE = ["--batch-size", "8", "--device-type", "nvidia-t4", "--json"]


@pytest.fixture
def file(tmp_path: Path) -> str:
    flops = Affine(fixed=0, per_sample=1e9)
    one = Operation(
        kind="aten.mm",
        family="matmul",
        count=1,
        flops=flops,
        bytes=Affine(fixed=1e6, per_sample=1e6),
    )
    structure = Structure(
        batch_size=8,
        optimizer="sgd",
        precision="fp32",
        method="fake tensors",
        parameters=10,
        parameter_bytes=40,
        forward_flops_per_sample=1.0,
        activation_bytes_per_sample=1.0,
        peak_memory_bytes=Affine(fixed=1, per_sample=1),
        layers=[],
        features={},
        operations={},
        trace=[one],
    )
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
def test_an_option_that_the_file_contradicts_is_bad_input(
    file: str, options: list[str], says: str
) -> None:
    done = CliRunner().invoke(app, ["estimate", file, *ESTIMATE, *options])
    assert done.exit_code != 0
    assert says in str(done.exception) + done.output


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"flops": {"fixed": -1e300, "per_sample": 1e308}}, "flops of 0 to 1e+24"),
        ({"bytes": {"fixed": 0, "per_sample": -1}}, "bytes of 0 to 1e+24"),
        ({"dims": {"rows": {"fixed": 1e200, "per_sample": 0}}}, "dims.rows of 0 to 1e+24"),
        ({"count": 10**18}, "trace.0.count"),
        ({"family": "conv", "dims": {}}, "dims with batch, channels, filters"),
        (
            {"family": "conv_backward", "dims": {"filters": {"fixed": 8, "per_sample": 0}}},
            "has no batch, channels, groups",
        ),
        ({"family": "rnn", "dims": {}}, "'aten.mm' has no steps, batch"),
    ],
)
def test_an_impossible_operation_is_bad_input(file: str, change: dict[str, Any], says: str) -> None:
    document = json.loads(Path(file).read_text())
    document["trace"][0] |= change
    Path(file).write_text(json.dumps(document))
    done = CliRunner().invoke(app, ["estimate", file, *ESTIMATE])
    assert isinstance(done.exception, BadInput)
    assert says in str(done.exception)


@pytest.mark.parametrize(
    "held",
    [
        {"sizes": [1, 2], "values": []},
        {"sizes": [1, 1], "values": [1, 1]},
        {"sizes": [1, 10**400], "values": [1, 1]},
        {"sizes": [1, 2], "values": [1, -1]},
    ],
    ids=["no values", "sizes that do not rise", "a huge size", "less than nothing"],
)
def test_held_memory_must_be_a_curve(file: str, held: dict[str, Any]) -> None:
    Path(file).write_text(
        json.dumps(json.loads(Path(file).read_text()) | {"most_held_bytes": held})
    )
    done = CliRunner().invoke(app, ["estimate", file, *ESTIMATE])
    assert isinstance(done.exception, BadInput)
    assert "most_held_bytes" in str(done.exception)


def test_an_impossible_batch_size_is_bad_input(file: str) -> None:
    done = CliRunner().invoke(
        app, ["estimate", file, "--batch-size", "1000000000", "--device-type", "nvidia-t4"]
    )
    assert isinstance(done.exception, BadInput)
    assert "allowed: 1 to 1000000" in str(done.exception)


def test_an_option_that_agrees_with_the_file_is_accepted(file: str) -> None:
    plain, with_options = (
        CliRunner().invoke(app, ["estimate", file, *ESTIMATE, *options])
        for options in ([], ["--optimizer", "sgd", "--precision", "fp32"])
    )
    assert plain.exit_code == with_options.exit_code == 0, with_options.output
    assert json.loads(plain.stdout) == json.loads(with_options.stdout)


def test_an_estimate_shows_the_number_of_correcting_runs_only_with_a_store(
    file: str, tmp_path: Path
) -> None:
    options = ["estimate", file, "--batch-size", "8", "--device-type", "nvidia-t4"]
    (tmp_path / "store").mkdir()
    alone = CliRunner().invoke(app, options)
    with_store = CliRunner().invoke(app, [*options, "--store", f"file://{tmp_path / 'store'}"])
    assert "step time" in alone.output
    assert "corrected by" not in alone.output
    assert "0 finished runs" in with_store.output


@pytest.mark.parametrize(("family", "said"), [("rnn", True), ("matmul", False)])
def test_the_layer_table_marks_layers_whose_flops_are_not_counted(
    file: str, family: str, said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    structure = Structure.model_validate_json(Path(file).read_text())
    one = structure.trace[0].model_copy(update={"family": family})
    console.layers(structure.model_copy(update={"trace": [one]}), depth=3)
    assert ("fused recurrent layers" in capsys.readouterr().out) is said
