"""Exports with 8-bit integers that fall out of the tolerance: layers in float, or a fine-tuning."""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from stored_run import stored_run

from trainwright.tasks.errors import BadInput
from trainwright.tasks.export.export_run import export_run
from trainwright.tasks.runs.run import Run

UNEVEN = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
        with torch.no_grad():
            self.layers[0].weight[:, 0] *= 200
    def forward(self, x):
        return self.layers(x)[:, 0]
build_model = Net
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A regression; large weights of a column with small numbers cost the others their digits."""
    folder = tmp_path_factory.mktemp("uneven")
    rows = np.random.default_rng(0).normal(size=(600, 8))
    rows[:, 0] *= 0.005
    columns = {f"x{place}": rows[:, place] for place in range(8)}
    pq.write_table(pa.table({**columns, "y": rows[:, 1:].sum(1)}), folder / "rows.parquet")
    data = {
        "uri": str(folder / "rows.parquet"),
        "target": "y",
        "task": "tabular-regression",
    }
    return stored_run(folder, UNEVEN, data, epochs=20)


def test_the_layer_to_blame_is_named_and_the_line_offers_a_fine_tuning(run: Run) -> None:
    report = export_run(run, "onnx-int8", tolerance=0.05)
    assert report.kept_float == ["layers.0/linear"]
    assert not report.fine_tuned
    [said] = [one for one in report.notes if "--fine-tune" in one]
    assert "layers.0/linear" in said
    assert report.metrics.exported <= 1.05 * report.metrics.trained


def test_a_fine_tuned_model_needs_no_layer_in_float(run: Run) -> None:
    report = export_run(run, "onnx-int8", tolerance=0.8, fine_tune=True)
    assert report.fine_tuned
    [said] = [one for one in report.notes if "trained again" in one]
    assert re.search(r"that of epoch \d+ of 10, which had the best metric", said)
    assert report.kept_float == []
    assert report.metrics.exported <= 1.8 * report.metrics.trained
    assert report.differences is not None
    assert 0 < report.differences.median < report.differences.largest < 1


def test_layers_stay_in_float_if_fine_tuning_is_not_enough(run: Run) -> None:
    report = export_run(run, "onnx-int8", tolerance=0.01, fine_tune=True)
    assert not report.fine_tuned
    assert report.kept_float == ["layers.0/linear"]


def test_a_fine_tuning_is_refused_for_other_kinds(run: Run) -> None:
    with pytest.raises(BadInput, match="--fine-tune: got --to onnx; allowed with --to onnx-int8"):
        export_run(run, "onnx", fine_tune=True)
