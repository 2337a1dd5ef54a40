"""A whole job on a GPU by the command line, from its data to the trained model."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from gpu_case import gpu
from test_training_by_model_reader import READER

from trainwright.tasks.data.dataset import load
from trainwright.tasks.spec.data_spec import DataSpec

MODEL = """
import torch
from torch import nn


def build_model(width=64):
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.2),
        nn.Flatten(), nn.Linear(width * 16, 128), nn.ReLU(), nn.Linear(128, 10),
    )
"""


def _trainwright(folder: Path, *words: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "trainwright.tasks.cli.main", *words, "--json"],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "TRAINWRIGHT_HOME": str(folder / "home")},
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_job_trains_on_a_gpu_and_its_measured_figures_are_known(tmp_path: Path) -> None:
    """The model's source reads the data, so that the job needs no Great Expectations."""
    device = gpu()
    digits = load(DataSpec(uri="builtin:digits"))
    inputs, labels = digits.batch(np.arange(digits.schema.rows))
    parts = {"train": digits.split.train, "validation": digits.split.validation}
    np.savez(tmp_path / "own.npz", images=inputs["inputs"], labels=labels, **parts)
    (tmp_path / "net.py").write_text(MODEL + READER)
    devices = [{"type": device.device_type, "count": 1}]
    host = {"name": "here", "address": "localhost", "devices": devices}
    (tmp_path / "pool.json").write_text(json.dumps({"name": "gpu", "hosts": [host]}))
    job = {
        "name": "digits-gpu",
        "pool": "pool.json",
        "data": {"uri": "own.npz", "reader": "model"},
        "model": {"source": "net.py"},
        "train": {
            "epochs": 6,
            "global_batch_size": 64,
            "learning_rate": 0.002,
            "optimizer": {"name": "adamw"},
            "precision": "amp",
            "backend": "torch",
        },
        "objective": {"minimize": "time"},
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    store = (tmp_path / "store").as_uri()
    found = _trainwright(tmp_path, "train", str(tmp_path / "job.json"), "--store", store)
    print(json.dumps({name: found[name] for name in ("metrics", "measured")}, indent=1)[:3000])
    assert found["state"] == "success"
    assert found["metrics"]["accuracy"] > 0.9
    assert [one["type"] for one in found["devices"]] == [device.device_type]
    assert math.isfinite(found["measured"]["energy_j"])
