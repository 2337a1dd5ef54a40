"""Models that the export benchmarks train: plain networks and generated ones, with their rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from trainwright.estimator.trace import source as model_source
from trainwright.estimator.trace.batch_loss import loss_function
from trainwright.tasks.data.dataset import Dataset
from trainwright.tasks.data.prepared import prepared
from trainwright.tasks.export.exportable import CALIBRATION_ROWS, Exportable, RowsFiles
from trainwright.tasks.recommend.source_code import Header, write_source
from trainwright.tasks.recommend.templates import templates
from trainwright.tasks.spec.data_spec import DataSpec

JOBS = Path(__file__).parents[3] / "dags/jobs"
_RATE, _BATCH = 2e-3, 64


@dataclass(frozen=True)
class TrainedCase:
    """Data, and the network that is trained on it: a source, or a template with its size."""

    data: dict[str, Any]
    epochs: int = 10
    source: str = ""
    template: tuple[str, str] = ("", "")
    config: dict[str, Any] = field(default_factory=dict)


def exportable(name: str, case: TrainedCase, folder: Path) -> Exportable:
    """Train a case for its epochs; the model and its rows in a folder. One thread, one seed."""
    torch.manual_seed(0)
    data = prepared(DataSpec.model_validate(case.data), folder.parent, 0)
    (code := folder / "source").mkdir(parents=True)
    text, config = case.source, dict(case.config)
    if case.template[0]:
        template = templates()[case.template[0]]
        sizes = template.sizes[case.template[1]]
        text = template.source(data.schema, sizes, Header("benchmark", "benchmark", "benchmark"))
    path = write_source(code, text)
    definition = model_source.load(code, path.name)
    model = model_source.build(definition, config)
    rows, held_out = data.split.train[:], data.split.validation[:]
    _train(model, definition, data, rows, case.epochs)
    save_file(model.state_dict(), folder / "model.safetensors")
    calibration = rows[:: max(1, -(-len(rows) // CALIBRATION_ROWS))]
    validation, targets = _saved(data, held_out, folder, "validation")
    kept, kept_targets = _saved(data, calibration, folder, "calibration")
    task = data.schema.task
    return Exportable(
        folder=folder,
        source=code,
        entry=path.name,
        config=config,
        precision="fp32",
        weights=folder / "model.safetensors",
        schema=data.schema,
        vocabularies=data.names(),
        run_uri=f"file:///benchmark/{name}",
        data_sha256=data.schema.sha256,
        metric="rmse" if task == "tabular-regression" else "accuracy",
        trained=0.0,
        rows=RowsFiles(validation, targets, kept, kept_targets),
    )


def _train(model: Any, definition: Any, data: Dataset, rows: Any, epochs: int) -> None:
    loss = loss_function(definition, data.schema.task)
    if definition.adapt is not None:
        inputs, targets = _tensors(data, rows)
        with torch.no_grad():
            definition.adapt(model, inputs, targets, data.names())
    optimizer = torch.optim.AdamW(model.parameters(), _RATE)
    steps = epochs * -(-len(rows) // _BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(rows)).split(_BATCH):
            inputs, targets = _tensors(data, rows[batch.numpy()])
            optimizer.zero_grad()
            loss(model(inputs), targets).backward()
            optimizer.step()
            schedule.step()
    model.eval()


def _tensors(data: Dataset, rows: Any) -> tuple[Any, torch.Tensor]:
    inputs, targets = data.batch(rows)
    found = {name: torch.from_numpy(np.array(one)) for name, one in inputs.items()}
    given = next(iter(found.values())) if len(found) == 1 else found
    return given, torch.from_numpy(np.array(targets))


def _saved(data: Dataset, rows: Any, folder: Path, part: str) -> tuple[dict[str, Path], Path]:
    inputs, targets = data.batch(rows)
    files = {name: folder / f"{part}-{number}.npy" for number, name in enumerate(inputs)}
    for name, path in files.items():
        np.save(path, inputs[name])
    np.save(folder / f"{part}-targets.npy", targets)
    return files, folder / f"{part}-targets.npy"
