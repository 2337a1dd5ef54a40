"""The kind `rtl` from a stored model to cells, and the programs of its README."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import circuit_runs
import pytest

from trainwright.infra.sandbox import SandboxLimits
from trainwright.tasks.errors import BadInput
from trainwright.tasks.export.circuits.to_circuit import to_circuit
from trainwright.tasks.export.exportable import ExportOptions

pytestmark = pytest.mark.slow  # needs Icarus Verilog, which `make setup-system` installs
_LIMITS = SandboxLimits(500, 8 * 2**30)


def programs(readme: str) -> dict[str, str]:
    """The README's programs by name."""
    blocks = re.findall(r"```(?:sh|python)\n(# (\S+):.*?)```", readme, re.DOTALL)
    return {name: text for text, name in blocks}


@pytest.mark.timeout(1200)
def test_a_small_net_becomes_circuits_that_are_right(tmp_path: Path) -> None:
    model = circuit_runs.exportable(tmp_path / "model")
    (out := tmp_path / "out").mkdir()
    report = to_circuit(model, out, ExportOptions(_LIMITS, tolerance=0.02))
    assert report.mismatches == 0
    assert report.vectors == 120  # 60 rows, in both styles
    assert report.metrics.exported >= report.metrics.trained - 0.02
    made = {(one.style, one.family): one for one in report.cells}
    assert set(made) == {(s, f) for s in ("pipelined", "sequential") for f in ("ice40", "ecp5")}
    assert all(one.lookup_tables and one.fmax_mhz for one in made.values())
    assert report.latency_cycles["pipelined"] < report.latency_cycles["sequential"]
    least = report.least_energy()
    assert least is not None
    assert least.energy_j == report.energy_j
    for (style, family), one in made.items():
        assert one.latency_cycles == report.latency_cycles[style]
        assert style == "sequential" or one.fmax_mhz == report.fmax_mhz[family]
    assert set(report.files) == {path.name for path in out.iterdir()}
    readme = (out / "README.md").read_text()
    assert f"inference: {least.energy_j:.2g} J by the {least.named}" in readme
    for said in ("at `model_inp` 4 inputs of", "at `model_out` 3 outputs of", "`input_value` ("):
        assert said in readme
    found = programs(readme)
    assert set(found) == {"simulate.sh", "synthesise.sh", "predict_rows.py"}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    printed = {}
    for name in ("simulate.sh", "synthesise.sh"):
        done = subprocess.run(
            ["bash", "-e"],
            input=found[name],
            cwd=out,
            env={**os.environ, "PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, done.stdout
        printed[name] = done.stdout
    assert "vectors 60 outputs 180 mismatches 0" in printed["simulate.sh"]
    assert "Max frequency for clock" in printed["synthesise.sh"]
    ran = subprocess.run(
        [sys.executable, "-c", found["predict_rows.py"]], cwd=out, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr


SPOILS = """
import numpy
from trainwright.tasks.export.circuits.integer_model import IntegerModel


def save(self, path):
    with open(path, "wb") as file:
        numpy.savez(file, text=numpy.frombuffer(b'{"layers": []}', dtype=numpy.uint8))


IntegerModel.save = save
"""


def test_a_file_that_the_models_code_spoiled_is_refused_in_one_line(tmp_path: Path) -> None:
    model = circuit_runs.exportable(tmp_path / "model")
    (model.source / "net.py").write_text(SPOILS + circuit_runs.SOURCE)
    (out := tmp_path / "out").mkdir()
    with pytest.raises(BadInput, match=r"^model: model\.npz is not an integer model: 0 layers; al"):
        to_circuit(model, out, ExportOptions(_LIMITS, tolerance=0.02))
