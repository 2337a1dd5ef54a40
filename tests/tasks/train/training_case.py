"""A small training for the tests of this folder, and the same training in one plain process."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import doors
import numpy as np
import psutil

from trainwright.estimator.curves import Interval
from trainwright.tasks.data import dataset as data
from trainwright.tasks.runs.artefacts.plan import Plan, PlannedDevice
from trainwright.tasks.spec.job import Job
from trainwright.tasks.storage.folder import FolderStore
from trainwright.tasks.train import TrainRequest
from trainwright.tasks.train.checkpoint.fence import read_index

LEARNING_RATE = 0.01
NO_SPARE: dict[str, Any] = {"faults": {"restarts": 0}}
"""For trainings that lose no rank: start no spare process."""
SLOW = [{"type": "emulated", "speed": 1.0}, {"type": "emulated", "speed": 0.5}]
"""Devices on which a step with 40 and 20 samples takes 40 ms."""
ROWS = 1438
"""number of training digits if a fifth of all digits validates"""
MODEL = """
import torch


class Net(torch.nn.Module):
    def __init__(self, norm, dropout, broken):
        super().__init__()
        # before a norm, the gradient of a bias is rounding noise
        self.conv = torch.nn.Conv2d(1, 6, 3, bias=norm is not True)
        self.norm = torch.nn.BatchNorm2d(6) if norm in (True, "biased") else torch.nn.Identity()
        self.flat = torch.nn.BatchNorm1d(6 * 36) if norm == "features" else torch.nn.Identity()
        self.drop = torch.nn.Dropout(dropout)
        self.out = torch.nn.Linear(6 * 36, 3 if broken else 10)
        self.unused = torch.nn.Linear(2, 2)

    def forward(self, images):
        return self.out(self.drop(self.flat(torch.relu(self.norm(self.conv(images))).flatten(1))))


def build_model(norm=False, dropout=0.0, broken=False):
    return Net(norm, dropout, broken)
"""


WEIGHTED = {
    "a mean": """

def loss(outputs, targets):
    counts = targets > 5
    return torch.nn.functional.cross_entropy(outputs[counts], targets[counts])


def loss_weight(targets):
    return (targets > 5).sum()
""",
    "a pair": """

def loss(outputs, targets):
    weights = torch.tensor([0.0, 0, 0, 0.5, 0, 0, 1, 2, 4, 7], dtype=outputs.dtype)
    sums = torch.nn.functional.cross_entropy(outputs, targets, weights, reduction="sum")
    return sums, weights[targets].sum()
""",
}
"""Losses that are means over some of the samples, or weigh them: NaN of batches without any."""


def planned(devices: list[dict[str, Any]], batch_sizes: list[int]) -> Plan:
    """A plan of these devices with these shares of the global batch."""
    time = Interval(median=0.01, low=0.01, high=0.02)
    return Plan(
        feasible=True,
        objective="time",
        devices=[
            PlannedDevice.model_validate(
                {
                    "id": f"here/{number}",
                    "host": "here",
                    "address": "localhost",
                    "index": number,
                    "batch_size": batch,
                    "step_time_s": time,
                    "peak_memory_bytes": 1e8,
                    **device,
                }
            )
            for number, (device, batch) in enumerate(zip(devices, batch_sizes, strict=True))
        ],
        global_batch_size=sum(batch_sizes),
        steps_per_epoch=1,
        epochs=1,
        strategy={"name": "data-parallel"},
        predicted=None,
        deadline_s=None,
        solve_time_s=0.0,
    )


def request(
    folder: Path,
    batch_sizes: list[int],
    *,
    model: dict[str, Any] | None = None,
    devices: list[dict[str, Any]] | None = None,
    validation_fraction: float = 0.2,
    augment: str = "none",
    **train: Any,
) -> TrainRequest:
    """A training of a small network on the digits with these batch sizes, on emulated devices."""
    source = folder / "source"
    source.mkdir(parents=True, exist_ok=True)
    (source / "net.py").write_text(MODEL)
    pool = folder / "pool.json"
    pool.write_text(
        json.dumps({"name": "p", "hosts": [{"name": "here", "devices": [{"type": "cpu"}]}]})
    )
    spec = {
        "epochs": 1,
        "schedule": "constant",
        "adaptive_split": False,
        "optimizer": {"name": "momentum"},
        "checkpoint": {"every_steps": 5},
        **train,
    }
    job = Job.model_validate(
        {
            "name": "case",
            "pool": str(pool),
            "data": {
                "uri": "builtin:digits",
                "validation_fraction": validation_fraction,
                "augment": augment,
            },
            "model": {"source": str(source / "net.py"), "config": model or {}},
            "train": spec,
        }
    )
    return TrainRequest(
        job=job,
        plan=planned(
            devices or [{"type": "emulated", "speed": 1e6}] * len(batch_sizes), batch_sizes
        ),
        learning_rate=LEARNING_RATE,
        schema=data.describe(job.data),
        source_folder=str(source),
        entry="net.py",
        run_uri=(folder / "run").as_uri(),
        work_folder=str(folder / "work"),
        settings=doors.settings(),
    )


def alone(
    asked: TrainRequest,
    parts: list[int] | Callable[[int], list[int]] | None = None,
    reordered: int | None = None,
    metrics: list[dict[str, float]] | None = None,
) -> dict[str, Any]:
    """The parameters and buffers after the same training by plain torch in one process.

    It trains on the joint batches, with the masks of dropout that ranks make. With `parts`, it
    processes each batch in parts of this many samples, which may follow from the size of the batch,
    and sums their gradients in fp32. With `reordered`, the samples of each batch are
    shuffled with this seed. Appends loss and accuracy to `metrics`: of each joint batch before its
    update, and of the held-out rows after each epoch (with the epoch's number); and the loss's
    weight, if the source's loss returns a pair.
    """
    import torch

    from trainwright.estimator import precision
    from trainwright.estimator.trace import source
    from trainwright.tasks.train.batch.sampling import epoch_order
    from trainwright.tasks.train.passes import keyed_dropout

    keyed_dropout.install()
    spec = asked.job.train
    dtype = precision.PARAMETER_DTYPES[spec.precision]
    torch.set_num_threads(1)
    torch.set_default_dtype(dtype)
    try:
        torch.manual_seed(spec.seed)
        assert asked.job.model is not None
        definition = source.load(Path(asked.source_folder), asked.entry)
        model = source.build(definition, asked.job.model.config)
        precision.cast(model, spec.precision)
    finally:
        torch.set_default_dtype(torch.float32)
    make = {
        "sgd": lambda p: torch.optim.SGD(p, lr=LEARNING_RATE),
        "momentum": lambda p: torch.optim.SGD(p, lr=LEARNING_RATE, momentum=0.9),
        "adam": lambda p: torch.optim.Adam(p, lr=LEARNING_RATE),
        "adamw": lambda p: torch.optim.AdamW(
            p, lr=LEARNING_RATE, weight_decay=spec.optimizer.weight_decay
        ),
    }
    decayed = [one for one in model.parameters() if one.ndim > 1]
    free = [{"params": [one], "weight_decay": 0.0} for one in model.parameters() if one.ndim < 2]
    all_decay = spec.optimizer.decay_exclude == "none"
    grouped: Any = model.parameters() if all_decay else [{"params": decayed}, *free]
    optimizer = make[spec.optimizer.name](grouped)
    dataset = data.load(asked.job.data, spec.seed)
    rows, held_out = dataset.split.train, dataset.split.validation
    every, labels = np.arange(len(dataset.targets)), torch.from_numpy(dataset.targets)

    def images(epoch: int | None = None) -> Any:
        seen = dataset if epoch is None else dataset.in_epoch(epoch)
        return torch.from_numpy(seen.batch(every)[0]["inputs"])

    def mean_loss(outputs: Any, targets: Any, **smoothing: float) -> Any:
        loss = definition.loss or torch.nn.functional.cross_entropy
        given = loss(outputs, targets, **smoothing)
        total, weight = given if isinstance(given, tuple) else (given * len(targets), len(targets))
        return total / weight, weight

    def evaluate(inputs: Any, these: Any) -> dict[str, float]:
        model.eval()
        with torch.no_grad():
            outputs = model(inputs[these].to(dtype))
        model.train()
        right = outputs.argmax(1) == labels[these]
        loss, weight = mean_loss(outputs, labels[these])
        accuracy = int(right.sum()) / len(these)
        return {"loss": float(loss), "weight": float(weight), "accuracy": accuracy}

    size, step = asked.plan.global_batch_size, 0
    for epoch in range(spec.epochs):
        order, inputs = epoch_order(rows, spec.seed, epoch), images(epoch)
        for at in range(0, len(order), size):
            batch = torch.as_tensor(order[at : at + size])
            if reordered is not None:
                batch = batch[
                    torch.randperm(
                        len(batch), generator=torch.Generator().manual_seed(reordered + at)
                    )
                ]
            if metrics is not None:
                metrics.append(evaluate(inputs, batch))
            used = [one for name, one in model.named_parameters() if not name.startswith("unused")]
            sums = [torch.zeros_like(one, dtype=precision.wide(dtype)) for one in used]
            sizes = parts(len(batch)) if callable(parts) else parts
            for part in batch.split(sizes) if sizes is not None else [batch]:
                if parts is None:
                    keyed_dropout.begin_pass(spec.seed, step, 0, len(batch))
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=spec.precision == "amp"):
                    outputs = model(inputs[part].to(dtype))
                targets = labels[part]
                smoothing = {"label_smoothing": spec.label_smoothing}
                loss, _ = mean_loss(
                    outputs.to(precision.wide(outputs.dtype)),
                    targets,
                    **(smoothing if spec.label_smoothing else {}),
                )
                for total, own in zip(
                    sums, torch.autograd.grad(loss * (len(part) / len(batch)), used), strict=True
                ):
                    total += own
            for one, total in zip(used, sums, strict=True):
                one.grad = total.to(one.dtype)
            if spec.clip_norm is not None:
                norm = torch.nn.utils.get_total_norm([one.grad.double() for one in used])
                torch.nn.utils.clip_grads_with_norm_(used, spec.clip_norm, norm)
            optimizer.step()
            keyed_dropout.end_pass()
            step += 1
        if metrics is not None:
            metrics.append({"epoch": epoch, **evaluate(images(), torch.as_tensor(held_out))})
    return dict(model.state_dict())


def ranks() -> dict[int, psutil.Process]:
    """The rank processes that are descendants of this process, by number."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            words = process.cmdline()
            if (
                "trainwright.tasks.train.worker.entry" in words
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                environment = process.environ()
                found[int(environment["HOROVOD_RANK"])] = process
    return found


def when_checkpoint(folder: Path, step: int, then: Callable[[], object]) -> threading.Thread:
    """Call `then` when the run's folder has a valid checkpoint of this or a later step."""

    def there() -> bool:
        index, _ = read_index(FolderStore(folder / "run"))
        return any(one.step >= step for one in index.checkpoints)

    return once(there, then)


def rows(asked: TrainRequest, kind: str) -> list[dict[str, Any]]:
    """A training's rows under metrics/, in the order of the files."""
    import pyarrow.parquet as pq

    folder = Path(asked.work_folder).parent / "run" / "metrics"
    parts = sorted(folder.glob(f"{kind}-*.parquet"))
    return [row for part in parts for row in pq.read_table(part).to_pylist()]


def scalars(asked: TrainRequest) -> dict[str, list[tuple[int, float]]]:
    """A training's TensorBoard scalars: by tag (step, value), in fp32; steps count from 1."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = Path(asked.work_folder).parent / "run" / "events"
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0})  # keep all values
    found.Reload()
    return {
        tag: [(one.step, one.value) for one in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }


def once(condition: Callable[[], bool], then: Callable[[], object]) -> threading.Thread:
    """Call `then` as soon as a condition holds."""

    def wait() -> None:
        until = time.monotonic() + 400  # ranks may take a minute to start on a busy machine
        while time.monotonic() < until:
            if condition():
                then()
                return
            time.sleep(0.01)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def assert_every_sample_once(asked: TrainRequest, ranks: int, epochs: int) -> list[float]:
    """Check that each rank has each step once, and each epoch all rows; returns the losses."""
    by_rank = [rows(asked, f"steps-rank{rank}") for rank in range(ranks)]
    for own in by_rank:
        assert max(Counter(row["step"] for row in own).values(), default=0) <= 1
    samples: Counter[int] = Counter()
    losses: dict[int, float] = {}
    for row in [row for own in by_rank for row in own]:
        samples[row["epoch"]] += row["batch_size"]
        losses[row["step"]] = row["loss"]
    assert samples == dict.fromkeys(range(epochs), ROWS)
    assert sorted(losses) == list(range(len(losses)))
    return [losses[step] for step in sorted(losses)]


def with_min_count(asked: TrainRequest, count: int) -> TrainRequest:
    """The same training with another `devices.min_count`."""
    devices = asked.job.devices.model_copy(update={"min_count": count})
    return asked.model_copy(update={"job": asked.job.model_copy(update={"devices": devices})})


def pids(heard: list[dict[str, Any]]) -> dict[int, int]:
    """The process id of each loaded rank, by the events."""
    found = {}
    for event in [event for event in heard if event["event"] == "rank"]:
        found[event["rank"]] = event["pid"] if event["state"] == "loaded" else 0
    return {number: pid for number, pid in found.items() if pid}
