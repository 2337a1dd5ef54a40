"""Compares the best candidates on the data's own rows, in a process with a limit of time.

`comparison` is what that process does; `told_apart` says which of two results is better for sure.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np  # noqa: TID253 - loaded only to recommend

from trainwright.infra.process import dying_with_parent
from trainwright.infra.sandbox.client import scrubbed_environment
from trainwright.tasks.errors import TrainwrightError, from_document
from trainwright.tasks.recommend.trials.comparison import (
    ComparedModel,
    Comparison,
    ComparisonRequest,
)
from trainwright.tasks.recommend.trials.trial import Trial
from trainwright.tasks.runs.model import ModelSource
from trainwright.tasks.settings import Settings
from trainwright.tasks.spec.data_spec import DataSpec
from trainwright.tasks.spec.train_spec import TrainSpec

SHARE, MOST_S = 0.1, 120.0
"""The time of all trainings together: a share of the deadline, and seconds at most."""
_START_S = 4.0
"""until the process trains: its imports, in seconds"""
_LATE = 4.0
"""The process is killed after so many times its time: another one may slow its steps down."""


def budget_s(deadline_s: float | None, given_s: float | None = None) -> float:
    """The time of all trainings together, in seconds. `given_s`: of the job."""
    if given_s is not None:
        return given_s
    return min(MOST_S, SHARE * deadline_s) if deadline_s is not None else MOST_S


def compare(
    models: Mapping[str, tuple[ModelSource, TrainSpec]],
    data: DataSpec,
    seed: int,
    settings: Settings,
    limit_s: float,
    steps: int | None = None,
) -> Comparison:
    """What each model reaches in a part of its training, within `limit_s` or with so many steps.

    No result if the time is too short. The process gets no secret. Raises BadInput,
    TrainwrightError if it fails.
    """
    nothing = Comparison(trials={}, share=None)
    if steps is None and limit_s <= _START_S:
        return nothing
    with tempfile.TemporaryDirectory(prefix="trainwright-probe-") as folder:
        request = ComparisonRequest(
            data=data,
            home=str(settings.home),
            seed=seed,
            models={
                name: ComparedModel(
                    folder=str(model.unpack(Path(folder) / name)), entry=model.entry, train=train
                )
                for name, (model, train) in models.items()
            },
            limit_s=limit_s - _START_S,
            steps=steps,
        )
        command = [sys.executable, "-P", "-m", "trainwright.tasks.recommend.trials.comparison"]
        try:
            done = subprocess.run(
                dying_with_parent(command),
                input=request.model_dump_json(),
                env=scrubbed_environment(),
                capture_output=True,
                text=True,
                check=False,
                timeout=_LATE * limit_s if steps is None else None,
            )
        except subprocess.TimeoutExpired:
            return nothing
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise TrainwrightError(f"recommend: a comparison exited with {done.returncode}: {last}")
    answer = json.loads(done.stdout)
    if isinstance(answer.get("error"), dict):
        raise from_document(answer["error"])
    return Comparison.model_validate_json(done.stdout)


def told_apart(better: Trial, worse: Trial) -> bool:
    """Whether the mean difference of their losses, row by row, is above its standard error."""
    if not math.isfinite(worse.error) or len(better.losses) != len(worse.losses):
        return better.error < worse.error
    gaps = np.array(worse.losses) - np.array(better.losses)
    if len(gaps) < 2:
        return better.error < worse.error
    return float(gaps.mean()) > float(gaps.std(ddof=1)) / math.sqrt(len(gaps))
