"""The sandboxed part: a stored model becomes integers, or one line says why not."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import circuit_runs
import numpy as np
import pytest
from sklearn.metrics import f1_score, log_loss, roc_auc_score

from trainwright.tasks.export.circuits.circuit_process import answer
from trainwright.tasks.export.circuits.integer_model import load


def asked(folder: Path, **changes: Any) -> tuple[dict[str, Any], bytes]:
    model = circuit_runs.exportable(folder / "model")
    head, _, stored = answer(circuit_runs.request(model, **changes)).partition(b"\n")
    return json.loads(head), stored


def test_the_integers_metric_is_within_the_tolerance_of_the_trained_one(tmp_path: Path) -> None:
    said, stored = asked(tmp_path)
    assert said["exported"] >= said["trained"] - 0.02
    assert said["styles"] == ["pipelined", "sequential"]
    (tmp_path / "model.npz").write_bytes(stored)
    model = load(tmp_path / "model.npz")
    rows = np.load(tmp_path / "model/validation.npy")
    outputs = model.outputs(model.run(model.prepare({"inputs": rows})))
    targets = np.load(tmp_path / "model/targets.npy")
    assert (outputs.argmax(1) == targets).mean() == said["exported"]


@pytest.mark.parametrize("metric", ["f1", "log_loss", "auc", "loss"])
def test_the_metric_is_the_jobs_own(metric: str, tmp_path: Path) -> None:
    said, stored = asked(tmp_path, metric=metric, tolerance=0.5)
    (tmp_path / "model.npz").write_bytes(stored)
    model = load(tmp_path / "model.npz")
    rows = np.load(tmp_path / "model/validation.npy")
    outputs = model.outputs(model.run(model.prepare({"inputs": rows})))
    targets = np.load(tmp_path / "model/targets.npy")
    shares = np.exp(outputs - outputs.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    wanted = {
        "f1": f1_score(targets, outputs.argmax(1), average="macro"),
        "auc": roc_auc_score(targets, shares, multi_class="ovr"),
        "log_loss": log_loss(targets, shares),
        "loss": log_loss(targets, shares),
    }
    assert said["exported"] == pytest.approx(wanted[metric], rel=1e-3)


def test_a_style_that_would_be_too_large_is_left_out(tmp_path: Path) -> None:
    capacity = {"cells": 10, "weights": 10_000, "cycles": 1_000_000}
    said, _ = asked(tmp_path, capacity=capacity)
    assert said["styles"] == ["sequential"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"capacity": {"cells": 10, "weights": 10, "cycles": 10}},
            r"its layer '\d' \(dense, .* to .*\) alone takes about .* cells, the whole model",
        ),
        ({"tolerance": -1.0}, "allowed: a higher --tolerance than -1"),
        ({"config": {"width": 5}}, "stored weights do not fit"),
    ],
)
def test_a_model_that_does_not_fit_is_one_line(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    said, stored = asked(tmp_path, **changes)
    assert stored == b""
    assert said["error"]["kind"] == "bad_input"
    assert "\n" not in said["error"]["message"]
    assert re.search(message, said["error"]["message"])


def test_missing_values_that_reach_the_circuit_are_refused(tmp_path: Path) -> None:
    model = circuit_runs.exportable(tmp_path / "model")
    rows = np.load(model.rows.calibration["inputs"])
    rows[3, 2] = np.nan
    np.save(model.rows.calibration["inputs"], rows)
    said = json.loads(io.BytesIO(answer(circuit_runs.request(model))).readline())
    assert "missing or infinite values" in said["error"]["message"]
