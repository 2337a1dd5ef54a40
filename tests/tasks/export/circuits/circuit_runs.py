"""Exportable models for tests of circuits: a trained dense net, and rows in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from trainwright.tasks.export.exportable import Exportable, RowsFiles
from trainwright.tasks.export.model_sandbox import model_request
from trainwright.tasks.runs.artefacts.data_schema import DataSchema

SOURCE = """from torch import nn


def build_model(width=6):
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))
"""


def exportable(folder: Path, width: int = 6) -> Exportable:
    """A net of a table of four numbers and three classes, trained for a moment."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(400, 4)).astype(np.float32)
    targets = rows[:, :3].argmax(1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))
    optimizer = torch.optim.Adam(net.parameters(), 0.02)
    for _ in range(150):
        optimizer.zero_grad()
        found = net(torch.from_numpy(rows))
        nn.functional.cross_entropy(found, torch.from_numpy(targets)).backward()
        optimizer.step()
    (folder / "source").mkdir(parents=True)
    (folder / "source/net.py").write_text(SOURCE)
    save_file(net.state_dict(), folder / "weights.safetensors")
    arrays = {"validation": rows[:60], "targets": targets[:60]}
    arrays |= {"calibration": rows[60:], "calibration_targets": targets[60:]}
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    schema = DataSchema(
        task="tabular-classification",
        rows=400,
        train_rows=340,
        validation_rows=60,
        inputs={"inputs": (4,)},
        input_dtypes={"inputs": "float32"},
        target="class",
        target_dtype="int64",
        classes=["a", "b", "c"],
        sha256="0" * 64,
    )
    return Exportable(
        folder=folder,
        source=folder / "source",
        entry="net.py",
        config={"width": width},
        precision="fp32",
        weights=folder / "weights.safetensors",
        schema=schema,
        vocabularies={},
        run_uri="file:///store/runs/net/1",
        data_sha256="0" * 64,
        metric="accuracy",
        trained=0.97,
        rows=RowsFiles(
            {"inputs": folder / "validation.npy"},
            folder / "targets.npy",
            {"inputs": folder / "calibration.npy"},
            folder / "calibration_targets.npy",
        ),
    )


def request(model: Exportable, **changes: Any) -> dict[str, Any]:
    """What the sandboxed process is asked."""
    return {
        **model_request(model),
        "tolerance": 0.02,
        "search_s": 2.0,
        "styles": ["pipelined", "sequential"],
        "capacity": {"cells": 50_000, "weights": 10_000, "cycles": 1_000_000},
        **changes,
    }
