"""Trainings in this process with the product's update code (`tasks.train.rank`), for many runs."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from lr_tasks import LrTask

from trainwright.estimator.curves import Interval
from trainwright.tasks.data import dataset as data
from trainwright.tasks.runs.artefacts.plan import Plan, PlannedDevice
from trainwright.tasks.spec.job import Job
from trainwright.tasks.train import TrainRequest
from trainwright.tasks.train.batch.sampling import epoch_order
from trainwright.tasks.train.rank.optimizer import learning_rate_at
from trainwright.tasks.train.rank.rank import Rank
from trainwright.tasks.train.worker.lr_ramp import search

MODELS = Path(__file__).with_name("models")


class Alone:
    """A collective of one rank."""

    rank, size, wait_s = 0, 1, 0.0

    def sum_(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        return tensor

    def start_sum(self, tensor: torch.Tensor, name: str) -> None:
        return None

    def finish(self, handle: Any) -> None:
        return None

    def shutdown(self) -> None:
        return None


class Silent:
    """A channel that discards all messages."""

    def progress(self, kind: str, **fields: Any) -> None:
        return None


class OneProcess:
    """A task with its data, read once; creates a rank for each training."""

    def __init__(self, task: LrTask) -> None:
        self.task = task
        self._folder = tempfile.TemporaryDirectory()
        uri = "builtin:digits"
        if task.data is not None:
            path = Path(self._folder.name) / "data.npz"
            task.data(path)
            uri = str(path)
        self._data = {"uri": uri, "target": "label", "task": task.task}
        self.dataset = data.load(self.job(0).data)
        rows, held_out = self.dataset.split.train, self.dataset.split.validation
        self.steps = math.ceil(len(rows) / task.batch) * task.epochs
        self._spread = (
            float(self.dataset.targets[held_out].var())
            if self.dataset.schema.classes is None
            else 0.0
        )

    def job(self, seed: int) -> Job:
        """The task as a job."""
        train = {"epochs": self.task.epochs, "seed": seed, "optimizer": self.task.optimizer}
        model = {"source": str(MODELS / "small.py"), "config": self.task.model}
        return Job.model_validate(
            {"name": "lr", "data": self._data, "model": model, "train": train}
        )

    def request(self, seed: int, learning_rate: float = 0.1) -> TrainRequest:
        """A request for the whole batch on one device."""
        one = PlannedDevice(
            id="here/0",
            type="cpu",
            host="here",
            address="localhost",
            index=0,
            cores=1.0,
            batch_size=self.task.batch,
            step_time_s=Interval(median=0.01, low=0.01, high=0.02),
            peak_memory_bytes=1e8,
        )
        plan = Plan(
            feasible=True,
            objective="time",
            devices=[one],
            global_batch_size=self.task.batch,
            steps_per_epoch=1,
            epochs=self.task.epochs,
            strategy={},
            predicted=None,
            deadline_s=None,
            solve_time_s=0.0,
        )
        return TrainRequest(
            job=self.job(seed),
            plan=plan,
            learning_rate=learning_rate,
            schema=self.dataset.schema,
            source_folder=str(MODELS),
            entry="small.py",
            run_uri=None,
            work_folder=self._folder.name,
        )

    def rank(self, seed: int) -> Rank:
        """A rank with a fresh model."""
        return Rank(self.request(seed), self.dataset, Alone(), torch.device("cpu"), 0)

    def searched(self, seed: int, learning_rates: list[float], trial_steps: int) -> dict[str, Any]:
        """A rank's report of a search: its points and its trials."""
        return search(self.rank(seed), Silent(), learning_rates, trial_steps)  # type: ignore[arg-type]

    def trained(self, learning_rate: float, seed: int) -> tuple[float, list[float]]:
        """Train, and return the final metric (accuracy or R², in percent) and each step's loss."""
        rank, losses = self.rank(seed), []
        total = len(rank.train_rows) * self.task.epochs
        samples = 0
        while samples < total:
            epoch, begin = divmod(samples, len(rank.train_rows))
            if begin == 0:
                order = epoch_order(rank.train_rows, seed, epoch)
            found = rank.step(order, begin, len(losses))
            losses.append(found.loss)
            if not math.isfinite(found.loss):
                break
            spec = rank.spec
            rank.update(
                learning_rate_at(samples, total, learning_rate, spec.schedule, spec.warm_up)
            )
            samples += found.samples
        return self._points(rank), losses

    def _points(self, rank: Rank) -> float:
        found = rank.validate().metrics
        if "accuracy" in found:
            return 100 * found["accuracy"]
        return (
            100 * max(0.0, 1 - found["loss"] / self._spread)
            if math.isfinite(found["loss"])
            else 0.0
        )
