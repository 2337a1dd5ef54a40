"""Averaging compared with summed gradients: final metric, bytes, and throughput of unlike devices.

    python tests/benchmarks/train/averaging.py [--tasks digits concrete docstrings] [--seeds 3]
        [--speeds 4:2:1:1] [--rounds 5] [--seconds 7] [--outer none]

Three of the product's own data sets are trained by four ranks, with summed gradients and with
averages, on as many samples from the same start, each with one learning rate for both. The ranks
are threads of this process with the product's own steps; an epoch ends with an evaluation. The
interval is the plan's for a network that is not the limit. Printed are the mean of the final metric
over seeds with its standard error, and the bytes that a rank sends in sums, without those of
evaluations, which are the same; those of the optimizer's moments at a checkpoint are apart. Bars:
a difference of at most two standard errors (of differences between seeds), and at most 1/16 of the
bytes.

Then real ranks on emulated devices of unlike speeds average every 16 steps; local steps have equal
batches. Printed is the throughput as a share of the sum of the devices' speeds (bar 0.97), and that
of summed gradients in the same rounds.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pace import asked_for, middle, paced, samples_per_s

sys.path.append(str(Path(__file__).parents[2] / "tasks" / "train" / "layouts"))

from layout_ranks import train_in_threads, with_layout
from training_case import planned

from trainwright.estimator.devices import EMULATED_SAMPLE_S
from trainwright.tasks.allocate.layouts.averages import LEAST_LOCAL_BATCH, AverageTimes, interval
from trainwright.tasks.data import dataset as data
from trainwright.tasks.spec.job import Job
from trainwright.tasks.train import TrainRequest
from trainwright.tasks.train.rank.optimizer import learning_rate_at
from trainwright.tasks.train.rank.rank import Rank

DATA = Path(__file__).parents[3] / "dags" / "jobs" / "data"
SPEEDS_OF_METRICS = [4, 2, 1, 1]
NEVER = 10**6
SOURCE = """
from torch import nn


class Words(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.table = nn.Embedding(1 << 13, 32, padding_idx=0)
        self.out = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, classes))

    def forward(self, tokens):
        found = self.table(tokens % (1 << 13))
        count = (tokens != 0).sum(1, keepdim=True).clamp_min(1)
        return self.out(found.sum(1) / count)


class Numbers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1)
        )

    def forward(self, rows):
        return self.layers(rows).squeeze(1)


def build_model(kind):
    if kind == "docstrings":
        return Words(5)
    if kind == "concrete":
        return Numbers()
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10),
    )
"""


@dataclass(frozen=True)
class MetricTask:
    """A data set, its metric, and how it is trained."""

    data: dict[str, Any]
    metric: str
    epochs: int
    batch: int
    learning_rate: float


TASKS = {
    "digits": MetricTask({"uri": "builtin:digits"}, "accuracy", 12, 32, 2e-3),
    "concrete": MetricTask(
        {
            "uri": str(DATA / "concrete.csv"),
            "target": "compressive_strength",
            "task": "tabular-regression",
        },
        "rmse",
        60,
        32,
        3e-3,
    ),
    "docstrings": MetricTask(
        {"uri": str(DATA / "docstrings.parquet"), "target": "topic", "text": "text"},
        "accuracy",
        8,
        64,
        3e-2,  # the best of 0.004, 0.012 and 0.03 with summed gradients
    ),
}


def request_of(folder: Path, name: str, seed: int) -> TrainRequest:
    """A training of a task on four ranks of unlike speeds."""
    task, source = TASKS[name], folder / "source"
    source.mkdir()
    (source / "net.py").write_text(SOURCE)
    total = sum(SPEEDS_OF_METRICS)
    split = [task.batch * one // total for one in SPEEDS_OF_METRICS]
    spec = {
        "epochs": task.epochs,
        "seed": seed,
        "optimizer": {"name": "adamw", "weight_decay": 0.01},
    }
    job = Job.model_validate(
        {
            "name": "averaging",
            "data": task.data,
            "model": {"source": str(source / "net.py"), "config": {"kind": name}},
            "train": spec,
        }
    )
    return TrainRequest(
        job=job,
        plan=planned([{"type": "emulated", "speed": 1e9}] * len(split), split),
        learning_rate=task.learning_rate,
        schema=data.describe(job.data),
        source_folder=str(source),
        entry="net.py",
        run_uri=(folder / "run").as_uri(),
        work_folder=str(folder / "work"),
    )


def averaged(asked: TrainRequest, steps_per_epoch: int, outer: str) -> TrainRequest:
    """The request with the layout `averaging`, as the plan chooses it on a fast network."""
    spec = asked.job.train
    times = AverageTimes(steps_per_epoch, NEVER, steps_per_epoch * spec.epochs, 2)
    least = min(one.batch_size for one in asked.plan.devices)
    return with_layout(
        asked,
        {},
        average_every=interval(times, 1.0, 0.0),
        local_batch=max(LEAST_LOCAL_BATCH, least),
        outer=outer,
    )


@dataclass(frozen=True)
class Trained:
    """The metric at the end, and the bytes that a rank summed: to train, and for a checkpoint."""

    metric: float
    step_bytes: float
    moment_bytes: float
    divergence: float
    every: int


def trained(asked: TrainRequest, folder: Path, metric: str, each: int) -> Trained:
    """Train in threads; an epoch of `each` steps ends with an evaluation."""
    total = each * asked.job.train.epochs

    def before(rank: Rank, step: int) -> None:
        if step and step % each == 0:
            rank.average()
            rank.validate()

    def then(rank: Rank) -> Trained:
        found = rank.validate().metrics[metric]
        summed = rank.collective.summed_bytes  # type: ignore[attr-defined]  # of a thread
        moments = sum(count for name, count in summed.items() if name.startswith("moments "))
        evaluated = sum(summed[name] for name in ("validation", "metrics"))
        averaging = rank.averaging
        return Trained(
            found,
            sum(summed.values()) - moments - evaluated,
            moments,
            averaging.divergence if averaging else 0.0,
            averaging.every if averaging else 1,
        )

    def rate(step: int) -> float:
        return learning_rate_at(step, total, asked.learning_rate, "cosine")

    return train_in_threads(asked, folder / "store", then, before=before, rate=rate)[0]


def metrics(name: str, seeds: int, outer: str) -> None:
    """Train a task in both ways, with several seeds, and print a line."""
    task = TASKS[name]
    found: dict[str, list[Trained]] = {"summed": [], "averaged": []}
    for seed in range(seeds):
        for way in random.sample(sorted(found), 2):
            with tempfile.TemporaryDirectory() as made:
                folder = Path(made)
                asked = request_of(folder, name, seed)
                rows = len(data.load(asked.job.data, seed).split.train)
                each = -(-rows // asked.plan.global_batch_size)
                # Both have the model's layers, so that both are the product's own code.
                how = with_layout(asked, {}) if way == "summed" else averaged(asked, each, outer)
                found[way].append(trained(how, folder, task.metric, each))
                last = found[way][-1]
            print(f"{name} {way} seed {seed}: {last}", file=sys.stderr, flush=True)
    summed, ours = ([one.metric for one in found[way]] for way in ("summed", "averaged"))
    gaps = [mine - other for mine, other in zip(ours, summed, strict=True)]
    noise = statistics.stdev(summed)
    bytes_of = {way: statistics.mean(one.step_bytes for one in found[way]) for way in found}
    moments = found["averaged"][0].moment_bytes / bytes_of["summed"]
    print(
        f"{name} ({each} steps an epoch, {task.epochs} epochs): {task.metric} "
        f"{statistics.mean(summed):.4f} with sums ({min(summed):.4f} to {max(summed):.4f}, "
        f"standard deviation {noise:.4f}), {statistics.mean(ours):.4f} with averages "
        f"({min(ours):.4f} to {max(ours):.4f}); difference {statistics.mean(gaps):+.4f}, "
        f"standard error {statistics.stdev(gaps) / math.sqrt(seeds):.4f}; bytes 1/"
        f"{bytes_of['summed'] / bytes_of['averaged']:.1f} (bar 1/16), and {moments:.5f} of the "
        f"summed ones for the moments of one checkpoint",
        flush=True,
    )


def throughput(text: str, given: argparse.Namespace) -> None:
    """Real ranks on emulated devices: samples per second as a share of the sum of speeds."""
    speeds = [float(one) for one in text.split(":")]
    split = [round(given.ms * 1e-3 * speed / EMULATED_SAMPLE_S) for speed in speeds]
    steps = round(1e3 * given.seconds / given.ms)
    devices = [{"type": "emulated", "speed": speed} for speed in speeds]
    found: dict[str, list[float]] = {"averaged": [], "summed": []}
    for _ in range(given.rounds):
        for way in random.sample(sorted(found), 2):
            with tempfile.TemporaryDirectory() as folder:
                asked = asked_for(
                    Path(folder), split, devices, steps, epoch_steps=steps, backend="torch"
                )
                if way == "averaged":
                    asked = with_layout(asked, {}, average_every=16, local_batch=min(split))
                rate = samples_per_s(paced(asked)[0], sum(split), rows=steps * sum(split))
            found[way].append(rate * EMULATED_SAMPLE_S / sum(speeds))
    print(
        f"speeds {text}, steps of {given.ms} ms, local batch {min(split)}: "
        f"{middle(found['averaged'])} of the sum of speeds (bar 0.97); summed gradients "
        f"{middle(found['summed'])}",
        flush=True,
    )


def main() -> None:
    """Measure, and print a line for each task and each set of speeds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--outer", default="none", choices=["none", "block-momentum", "nesterov"])
    parser.add_argument("--speeds", nargs="*", default=["4:2:1:1"])
    parser.add_argument("--ms", type=int, default=256, help="ideal duration of a step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each training")
    given = parser.parse_args()
    for name in given.tasks:
        metrics(name, given.seeds, given.outer)
    for text in given.speeds:
        throughput(text, given)


if __name__ == "__main__":
    main()
