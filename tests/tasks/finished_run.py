"""Writes the run folder of a finished training with the project's own parts, without training."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import doors
import torch

from trainwright.estimator.curves import Affine, DeviceCurve, Interval
from trainwright.estimator.precision import cast
from trainwright.estimator.trace import source as model_source
from trainwright.tasks.runs.artefacts.data_schema import DataSchema
from trainwright.tasks.runs.artefacts.estimate import Estimate
from trainwright.tasks.runs.artefacts.export_report import ExportReport, MetricPair
from trainwright.tasks.runs.artefacts.learning_rate_search import LearningRateSearch
from trainwright.tasks.runs.artefacts.plan import Plan, PlannedDevice, Prediction
from trainwright.tasks.runs.artefacts.run_job import RunJob
from trainwright.tasks.runs.artefacts.run_status import Status
from trainwright.tasks.runs.artefacts.training_result import (
    DeviceResult,
    Measured,
    Result,
    SplitEvent,
)
from trainwright.tasks.runs.artefacts.validation import Validation
from trainwright.tasks.runs.run import Run
from trainwright.tasks.spec.train_spec import CheckpointPolicy
from trainwright.tasks.storage.objects import ObjectStore
from trainwright.tasks.store import save_model, seal, seal_folder
from trainwright.tasks.train.checkpoint import files as checkpoint
from trainwright.tasks.train.checkpoint.fence import Fence, folder_name, read_index
from trainwright.tasks.train.checkpoint.tensors import as_file, optimizer_tensors
from trainwright.tasks.train.record.journal import Journals, StepJournal
from trainwright.tasks.train.record.metrics import Row, encode, part_key

MODEL = "import torch\n\n\ndef build_model(width=4):\n    return torch.nn.Linear(width, 3)\n"
BATCHES = (32, 16)
ALL_STEPS = 10**7


def interval(median: float) -> Interval:
    return Interval(median=median, low=0.8 * median, high=1.25 * median)


def begin_run(store: str, name: str, number: int, **train: Any) -> Run:
    """A run that has started; a greater `number` means a later start."""
    run = doors.run_at(f"{store}/runs/{name}/20260101T{number:06d}Z-abcdef")
    job = {
        "name": name,
        "data": {"uri": "builtin:digits"},
        "model": {"source": "/m.py", "config": {"width": 4}},
    }
    run.write(RunJob.model_validate(job | {"train": train}))
    run.write(
        Status(state="running", holder="me", started_at="2026-01-01", updated_at="2026-01-01")
    )
    files = {"m.py": MODEL.encode()}
    listing = {"entry": "m.py", "sha256": model_source.digest(files), "files": ["m.py"]}
    run.objects.put("source/m.py", files["m.py"])
    run.objects.put("source/source.json", json.dumps(listing).encode())
    schema = DataSchema(
        task="tabular-classification",
        rows=30,
        train_rows=24,
        validation_rows=6,
        inputs={"inputs": (4,)},
        input_dtypes={"inputs": "float32"},
        target="label",
        target_dtype="int64",
        classes=["a", "b", "c"],
        sha256="0",
    )
    run.write(
        Validation(
            success=True,
            suite_source="inferred",
            suite=[],
            suite_version="0123456789abcdef",
            expectations=[],
            data=schema,
            checked_rows=30,
            great_expectations={},
        )
    )
    return run


def save_checkpoint(
    store: ObjectStore,
    state: checkpoint.CheckpointState,
    model: dict[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
    policy: CheckpointPolicy,
) -> None:
    """Write a checkpoint, in the name of the launch that may add one."""
    fence = Fence(store, read_index(store)[0].owner)
    parts = ((checkpoint.MODEL, model), (checkpoint.OPTIMIZER, optimizer_tensors(optimizer)))
    for name, tensors in parts:
        data = b"".join(as_file(tensors))
        fence.put(f"{folder_name(state.step)}/{name}", data, state.add_file(name, data))
    checkpoint.write_state(fence, state, policy)


def write_checkpoints(run: Run, bests: tuple[bool, ...]) -> list[dict[str, torch.Tensor]]:
    """A checkpoint every 10 steps, marked as best or not; the weights of each."""
    written = []
    for number, best in enumerate(bests, start=1):
        torch.manual_seed(number)
        model = cast(torch.nn.Linear(4, 3), run.job().train.precision)
        state = checkpoint.CheckpointState(
            step=10 * number, epoch=number, split=list(BATCHES), best=best
        )
        policy = CheckpointPolicy(keep_last=len(bests))
        save_checkpoint(
            run.objects,
            state,
            model.state_dict(),
            torch.optim.SGD(model.parameters(), lr=0.1),
            policy,
        )
        written.append(model.state_dict())
    return written


def write_metrics(run: Run, steps: int, *, accuracy: bool = True) -> list[dict[str, Any]]:
    """Rows of two ranks in two parts each, and three epochs; the step rows."""
    random.seed(steps)
    written = []
    for rank, batch in enumerate(BATCHES):
        for first, last in ((0, steps // 2), (steps // 2, steps)):
            rows = list[Row]()
            for step in range(first, last):
                own, wait = random.uniform(0.01, 0.02), random.uniform(0, 0.005)
                row = {
                    "step": step,
                    "epoch": 3 * step // steps,
                    "rank": rank,
                    "batch_size": batch,
                    "loss": 1 / (1 + step),
                    "learning_rate": 0.01,
                    "compute_s": own,
                    "wait_s": wait,
                    "step_time_s": own + wait,
                }
                rows.append(row)
            write_rows(run, f"steps-rank{rank}", rows)
            written += rows
    epochs = list[Row]()
    for epoch in range(3):
        row = {
            "step": (epoch + 1) * steps // 3,
            "epoch": epoch,
            "train_loss": 1.0,
            "loss": 0.5 / (1 + epoch),
        }
        own = {"accuracy": 0.9 + epoch / 50} if accuracy else {}
        epochs.append({**row, **own, "duration_s": 1.0})
    write_rows(run, "epochs", epochs)
    return written


def store_journals(run: Run, journals: list[StepJournal]) -> None:
    """Store the ranks' journals, as a checkpoint does."""
    for journal in journals:
        journal.cut()
    noted = Journals(run.work_path)
    for name, rows in noted.parts(ALL_STEPS):
        run.objects.put(part_key(name), encode(rows))
    noted.drop(ALL_STEPS)


def write_rows(run: Run, kind: str, rows: list[Row]) -> None:
    """A part of the run's metrics."""
    run.objects.put(part_key(f"{kind}-{rows[0]['step']:08d}"), encode(rows))


def write_outcome(
    run: Run, *, metrics: dict[str, float], duration_s: float = 20.0, reason: str = "measured"
) -> Result:
    """Write plan, estimate, learning rate and result.

    Predicted: 25 s and 500 J; measured: `duration_s` and 1000 J.
    """
    predicted = Prediction(
        step_time_s=interval(0.02), duration_s=interval(25.0), energy_j=interval(500.0), cost=None
    )
    devices = [
        PlannedDevice(
            id=f"here/cpu-{rank}",
            type="cpu",
            host="here",
            address="localhost",
            index=rank,
            cores=1.0 / (1 + rank),
            batch_size=batch,
            step_time_s=interval(0.02),
            peak_memory_bytes=1e6,
        )
        for rank, batch in enumerate(BATCHES)
    ]
    run.write(
        Plan(
            feasible=True,
            objective="time",
            devices=devices,
            global_batch_size=48,
            steps_per_epoch=10,
            epochs=3,
            strategy={"name": "data-parallel"},
            predicted=predicted,
            deadline_s=None,
            solve_time_s=0.0,
        )
    )
    curves = [
        DeviceCurve(
            device_type="cpu",
            cores=device.cores,
            mode="calibrated",
            coverage=1.0,
            step_time_s=Affine(fixed=0.0, per_sample=0.001),
            low_factor=0.5,
            high_factor=2.0,
            peak_memory_bytes=Affine(fixed=1e6, per_sample=0.0),
            memory_safe_factor=1.5,
        )
        for device in devices
    ]
    run.write(Estimate(mode="calibrated", curves=curves, gradient_bytes=60.0))
    run.write(
        LearningRateSearch(learning_rate=0.01, interval=(0.001, 0.1), source="given", reason=reason)
    )
    result = Result(
        state="success",
        metrics=metrics,
        target_reached=None,
        predicted=predicted,
        measured=Measured(
            step_time_s=interval(0.019),
            duration_s=duration_s,
            peak_memory_bytes=1e6,
            energy_j=1000.0,
            energy_source="datasheet",
            cost=None,
        ),
        devices=[
            DeviceResult(
                id=device.id,
                type="cpu",
                rank=rank,
                batch_size=device.batch_size,
                samples=100,
                step_time_s=interval(0.015),
                wait_s=0.1,
                peak_memory_bytes=1.2e6,
                cpu_s=1.0,
                share="quota",
            )
            for rank, device in enumerate(devices)
        ],
        split_events=[SplitEvent(step=5, batch_sizes=list(BATCHES), reason=reason)],
        checkpoints=[],
        learning_rate=0.01,
        global_batch_size=48,
        steps=30,
        epochs=3,
        resumed_from_step=None,
        backend="torch",
        versions={"torch": "2"},
    )
    run.write(result)
    return result


def finished_training(store: str, name: str = "small", number: int = 1, **train: Any) -> Run:
    """A run whose training is done: checkpoints 10, 20, 30 (20 the best), metrics, result."""
    run = begin_run(store, name, number, **train)
    write_checkpoints(run, (True, True, False))
    write_metrics(run, 30)
    write_outcome(run, metrics={"accuracy": 0.95, "loss": 0.2})
    run.objects.put("logs/rank-0.log", b"hello\n")
    return run


def write_export(run: Run) -> ExportReport:
    """A sealed export to ONNX, whose model is no model."""
    report = ExportReport(
        kind="onnx",
        run=run.uri,
        data_sha256="0",
        files=["model.onnx", "report.json"],
        metric="accuracy",
        metrics=MetricPair(trained=0.95, exported=0.95),
        agreement=1.0,
        max_error=1e-7,
        rows=6,
    )
    run.objects.put("export/onnx/model.onnx", b"a model")
    run.objects.put("export/onnx/report.json", report.model_dump_json().encode())
    seal_folder(run, "export/onnx/")
    return report


def local_path(run: Run, key: str) -> Path:
    """The path of an object in a folder store."""
    return Path(run.uri.removeprefix("file://")) / key


def sealed_run(
    store: str,
    number: int,
    accuracy: float | None,
    name: str = "digits",
    export: Any = None,
    **promotion: Any,
) -> Run:
    """A finished run whose stored model has this accuracy, or only a loss."""
    metrics = {"loss": 0.1} if accuracy is None else {"accuracy": accuracy, "loss": 1 - accuracy}
    run = begin_run(store, name, number)
    job = run.job().model_dump(mode="json", exclude={"schema_version"})
    if promotion:
        job["promotion"] = promotion
    if export is not None:
        job["export"] = export
    run.write(RunJob.model_validate(job))
    write_checkpoints(run, (True,))
    write_outcome(run, metrics=metrics)
    save_model(run)
    signature = json.loads(run.objects.get("model/signature.json"))
    signature["metrics"] = metrics
    run.objects.put("model/signature.json", json.dumps(signature).encode())
    seal(run)
    return run
