"""Trains several models for a part of their recipes, in one process, and tests them on equal rows.

Every model gets the same share of its recipe's passes: the largest of `SHARES` that fits into the
time, by a few steps of each model that are measured first. So time decides the share, and with a
share the results are the same on every machine. With a number of steps, time decides nothing.

    python -m trainwright.tasks.recommend.trials.comparison < request.json > answer.json
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np  # noqa: TID253 - loaded only to recommend
from pydantic import BaseModel, ConfigDict, Field

from trainwright.estimator.errors import TrainwrightError
from trainwright.estimator.trace import source as model_source
from trainwright.estimator.trace.source import ModelDefinition
from trainwright.tasks.data.dataset import Dataset
from trainwright.tasks.data.prepared import prepared
from trainwright.tasks.recommend.similar_sets.data_figures import sampled
from trainwright.tasks.recommend.trials.trial import Trial, batch_of, train
from trainwright.tasks.spec.data_spec import DataSpec
from trainwright.tasks.spec.train_spec import TrainSpec

Array = np.ndarray[Any, Any]
SHARES = (1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64)
_TIMED_STEPS = (2, 8)
_LEAST_STEPS = 20
"""A training of fewer steps says nothing."""
_RESERVE = 1.25
"""A training may take this many times the time that its measured steps foretell."""


class ComparedModel(BaseModel):
    """One of the models, by its files and its recipe."""

    model_config = ConfigDict(frozen=True)
    folder: str = Field(description="of the model's source")
    entry: str
    train: TrainSpec


class ComparisonRequest(BaseModel):
    """Models by name, and the data that they are compared on."""

    model_config = ConfigDict(frozen=True)
    data: DataSpec = Field(description="on this machine")
    home: str = Field(description="folder of prepared data")
    seed: int = Field(description="of the split")
    models: dict[str, ComparedModel]
    limit_s: float = Field(description="for all trainings together")
    steps: int | None = Field(default=None, description="of each training, whatever the time")


class Comparison(BaseModel):
    """What each model reached."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")
    trials: dict[str, Trial] = Field(description="empty if the time is too short")
    share: float | None = Field(description="of each recipe's passes; None: a number of steps")


class _Contestant:
    """A model with its recipe, on the data's training rows."""

    def __init__(self, model: ComparedModel, data: Dataset) -> None:
        self.spec, self.data = model.train, data
        self.definition: ModelDefinition = model_source.load(Path(model.folder), model.entry)

    def trained(self, steps: int, limit_s: float = math.inf) -> Trial:
        """So many steps on as many rows as they pass at least once."""
        rows = self.data.split.train
        size = batch_of(self.spec, len(rows))
        chosen = sampled(rows, max(size, min(len(rows), steps * size)), self.spec.seed)
        passes = steps / (len(chosen) // size)
        return train(self.definition, self.data, self.spec, chosen, limit_s, passes)

    def steps(self, share: float) -> int:
        """The steps of this share of the recipe."""
        count = len(self.data.split.train)
        return round(share * self.spec.epochs * (count // batch_of(self.spec, count)))

    def whole_s(self) -> float:
        """The time that the whole recipe takes, by a few steps and an evaluation."""
        few, more = (self.trained(steps).seconds for steps in _TIMED_STEPS)
        step_s = max(1e-6, (more - few) / (_TIMED_STEPS[1] - _TIMED_STEPS[0]))
        return self.steps(1.0) * step_s + self.spec.epochs * few


def compared(request: ComparisonRequest) -> Comparison:
    """Train all models of the request. Raises BadInput, TrainwrightError if a source fails."""
    started = time.perf_counter()
    data = prepared(request.data, Path(request.home), request.seed)
    models = {name: _Contestant(one, data) for name, one in request.models.items()}
    if request.steps is not None:
        trials = {name: one.trained(request.steps) for name, one in models.items()}
        return Comparison(trials=trials, share=None)
    whole_s = {name: one.whole_s() for name, one in models.items()}
    limit_s = request.limit_s - (time.perf_counter() - started)
    needed_s = sum(whole_s.values())
    share = next((one for one in SHARES if one * needed_s * _RESERVE <= limit_s), None)
    if share is None or any(one.steps(share) < _LEAST_STEPS for one in models.values()):
        return Comparison(trials={}, share=share)
    return Comparison(
        trials={
            name: one.trained(one.steps(share), limit_s * whole_s[name] / needed_s)
            for name, one in models.items()
        },
        share=share,
    )


def main() -> int:
    """Answer the request on standard input."""
    import torch

    torch.set_num_threads(1)
    request = ComparisonRequest.model_validate_json(sys.stdin.read())
    try:
        answer = compared(request).model_dump_json()
    except TrainwrightError as error:
        answer = json.dumps({"error": error.document()})
    sys.stdout.write(answer)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
