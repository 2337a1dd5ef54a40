"""Measures the time that the training loop adds to a model's step on this machine.

Run it with `python -m trainwright.tasks.train.worker.measure_loop --out FILE`. It trains small
models, each large in one quantity on which the loop's time depends (`estimator.predict.loop_cost`).
Each model is trained by the loop with one rank, and by bare steps on the same batch, alternating in
random order. The measure is the thread's CPU time, which other load on the machine does not change.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np  # noqa: TID253 - this is a process of its own
import torch  # noqa: TID253

from trainwright.estimator.memory.freed_memory import map_blocks
from trainwright.estimator.predict.loop_cost import LoopCost, LoopWork, fit_loop, loop_work
from trainwright.estimator.trace import source as model_source
from trainwright.estimator.trace.source import BatchSpec
from trainwright.estimator.trace.trace import trace
from trainwright.estimator.trace.training_step import TrainingStepSpec, prepare
from trainwright.tasks.data import dataset as data
from trainwright.tasks.spec.job import Job
from trainwright.tasks.train.batch.sampling import epoch_order
from trainwright.tasks.train.channel import Message, PeerStatus, RankStatus
from trainwright.tasks.train.exchange.peers import Peers
from trainwright.tasks.train.rank.rank import Rank
from trainwright.tasks.train.request import Order, TrainRequest
from trainwright.tasks.train.worker.loop import Training
from trainwright.tasks.train.worker.measured_request import measured_job, measured_request
from trainwright.tasks.train.worker_group import WorkerGroup

_BATCH, _ROWS = 64, 256
_TOGETHER = 4  # timed steps in a row, after one that warms the caches
_LEAST_ROUNDS = 3
_SOURCE = """
from torch import nn


class MeasuredPart(nn.Module):
    def forward(self, inputs):
        return inputs[:, :8]


class Images(nn.Module):
    def forward(self, inputs):
        return inputs.view(len(inputs), 64, 16, 16)


class Mean(nn.Module):
    def forward(self, inputs):
        return inputs.mean(dim=(2, 3))


def build_model(kind):
    if kind == "deep":
        body = [nn.Linear(8, 8) for _ in range(24)]
    elif kind == "wide":
        body = [nn.Linear(8, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 8)]
    elif kind == "norms":
        body = [nn.BatchNorm1d(8) for _ in range(12)]
    elif kind == "image norms":
                body = [nn.Linear(8, 16384), Images(), nn.BatchNorm2d(64), nn.BatchNorm2d(64)]
                body += [Mean(), nn.Linear(64, 8)]
    else:
        body = []
    return nn.Sequential(MeasuredPart(), *body, nn.Linear(8, 2))
"""
_WIDTH_OF = {"plain": 8, "deep": 8, "wide": 8, "norms": 8, "image norms": 8, "inputs": 16384}


class _Unheard:
    """A channel that drops all messages."""

    leave_asked = abort_asked = -1
    writing = due = False

    def __init__(self) -> None:
        self.released: Callable[[int, int], None] = lambda step, stored: None

    def attend(self, peers: PeerStatus, rank: RankStatus | None = None) -> None:
        return

    def send(self, kind: str, **fields: Any) -> None:
        return

    def receive(self, *kinds: str) -> Message:
        raise AssertionError(kinds)

    def ask(self, about: str, **fields: Any) -> Message:
        return {}

    def progress(self, kind: str, **fields: Any) -> None:
        return


@dataclass
class Case:
    """A model, its step in the training loop and its bare step, and their measured seconds."""

    work: LoopWork
    trained: Callable[[], None]
    alone: Callable[[], None]
    trained_s: list[float] = field(default_factory=list)
    alone_s: list[float] = field(default_factory=list)

    @property
    def beyond_s(self) -> float:
        """The seconds that the loop adds; at least a microsecond."""
        return max(1e-6, statistics.median(self.trained_s) - statistics.median(self.alone_s))


def measure_loop(budget_s: float, folder: Path, seed: int = 0) -> LoopCost:
    """The loop's cost on one thread of this machine. `folder` takes models, data and records."""
    torch.set_num_threads(1)
    (folder / "model.py").write_text(_SOURCE)
    cases = [case_of(_job(folder, kind), folder / f"work {kind}") for kind in _WIDTH_OF]
    time_cases(cases, budget_s, random.Random(seed))
    return fit_loop([(case.work, case.beyond_s) for case in cases])


def time_cases(cases: Sequence[Case], budget_s: float, draw: random.Random) -> None:
    """Time all cases in rounds, in random order, until the budget is used."""
    began, rounds = time.monotonic(), 0
    while rounds < _LEAST_ROUNDS or time.monotonic() - began < budget_s:
        for case in draw.sample(cases, len(cases)):
            for step, seen in draw.sample(
                [(case.trained, case.trained_s), (case.alone, case.alone_s)], 2
            ):
                seen += _timed(step)
        rounds += 1


def _timed(step: Callable[[], None]) -> list[float]:
    step()
    seen = []
    for _ in range(_TOGETHER):
        started = time.thread_time()
        step()
        seen.append(time.thread_time() - started)
    return seen


def case_of(job: Job, work: Path) -> Case:
    """The case of a job with a given global batch on one local device; `work` must not exist."""
    assert job.model is not None
    dataset, source = data.load(job.data), Path(job.model.source)
    schema, batch = dataset.schema, int(job.train.global_batch_size)
    asked = measured_request(job, schema, work)
    rank = Rank(asked, dataset, Peers("torch"), torch.device("cpu"), 0)
    training = Training(rank, _Unheard(), _order(asked))
    training.enter(
        WorkerGroup(generation=1, members=[0], rendezvous="", checkpoint=None, reason="measured")
    )
    order = epoch_order(rank.train_rows, 0, 0)
    begun = [0]

    def trained() -> None:
        training.step(order, begun[0])
        begun[0] = (begun[0] + batch) % (len(order) // batch * batch)

    definition = model_source.load(source.parent, source.name)
    spec = BatchSpec(
        inputs=schema.inputs,
        input_dtypes=schema.input_dtypes,
        target_dtype=schema.target_dtype,
        target_shape=schema.target_shape,
        classes=len(schema.classes or ()),
        task=schema.task,
    )
    what = TrainingStepSpec(definition, job.model.config, spec, job.train.optimizer.model_dump())
    alone = prepare(what, model_source.build(definition, job.model.config), batch)
    # From the data, not zeros: layers that branch on values, such as pooling, run faster on zeros.
    inputs, targets = dataset.batch(order[:batch])
    chosen = {name: torch.from_numpy(array) for name, array in inputs.items()}
    alone.micro_batches = [(model_source.nested(chosen), torch.from_numpy(targets))]
    return Case(loop_work(trace(what, batch), batch), trained, alone)


def _job(folder: Path, kind: str) -> Job:
    draw = np.random.default_rng(0)
    table = folder / f"{_WIDTH_OF[kind]}.npz"
    if not table.exists():
        inputs = draw.random((_ROWS, _WIDTH_OF[kind]), dtype=np.float32)
        np.savez(table, inputs=inputs, label=draw.integers(0, 2, _ROWS))
    return measured_job(table, folder / "model.py", {"kind": kind}, _BATCH, 100_000)


def _order(request: TrainRequest) -> Order:
    Path(request.work_folder).mkdir()
    return Order(
        request=request,
        mode="train",
        backend="torch",
        cgroups=[None],
        launch="measured",
        started_at_s=time.time(),
    )


def main() -> int:
    """Measure, and write the cost as JSON."""
    parser = argparse.ArgumentParser(
        description="Measures the time that the training loop adds to a model's step here."
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=3.0, help="seconds to measure")
    given = parser.parse_args()
    map_blocks()
    with tempfile.TemporaryDirectory(prefix="trainwright-loop-") as name:
        given.out.write_text(measure_loop(given.budget, Path(name)).model_dump_json())
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # the saver's threads wait for checkpoints that never come
