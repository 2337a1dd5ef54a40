"""Compares the best candidates on real rows, by successive halving within a share of the time.

Round by round, the remaining candidates are trained on a sample that doubles, each in a process of
its own, and the worse half is dropped (K. Jamieson and A. Talwalkar, 2016). A round's training runs
its whole schedule within its time.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from trainwright.infra.process import dying_with_parent
from trainwright.infra.sandbox.client import scrubbed_environment
from trainwright.tasks.errors import TrainwrightError, from_document
from trainwright.tasks.recommend.trials.trial import Trial, TrialRequest
from trainwright.tasks.runs.model import ModelSource
from trainwright.tasks.settings import Settings
from trainwright.tasks.spec.data_spec import DataSpec
from trainwright.tasks.spec.train_spec import TrainSpec

MOST = 3
"""Candidates that are compared."""
SHARE = 0.1
"""of the deadline"""
_WITHOUT_DEADLINE_S = 120.0
_START_S = 8.0
"""until a trial's process trains: its imports, in seconds"""
_LEAST_S = 2.0
"""A trial shorter than this says nothing."""
_LATE = 4.0
"""A trial is killed after so many times its own time: another process may slow its steps down."""
_FIRST_ROWS = 5_000
Attempt = Callable[[str, int, float], Trial]
"""Trains the candidate with this name on so many rows for so many seconds."""


def budget_s(deadline_s: float | None) -> float:
    """The time of all trials together, in seconds."""
    return SHARE * deadline_s if deadline_s is not None else _WITHOUT_DEADLINE_S


def halved(names: Sequence[str], total_s: float, run: Attempt) -> dict[str, float]:
    """The error of each candidate in its last round; those that got further come first.

    `total_s` is divided equally among the rounds, and in each among its trials, whose starts count.
    Empty if that is too little time for a trial, or for one to see its sample once.
    """
    rounds = max(1, (len(names) - 1).bit_length())
    found: dict[str, float] = {}
    left, rows = list(names), _FIRST_ROWS
    for _ in range(rounds):
        each = total_s / rounds / len(left) - _START_S
        if each < _LEAST_S:
            break
        errors = {}
        for name in left:
            made = run(name, rows, each)
            if made.passes < 1:
                return {}
            errors[name] = made.error
        left = sorted(left, key=lambda name: errors[name])
        found = {name: errors[name] for name in left} | {
            name: error for name, error in found.items() if name not in errors
        }
        left, rows = left[: (len(left) + 1) // 2], 2 * rows
    return found


def trial(
    model: ModelSource, data: DataSpec, train: TrainSpec, settings: Settings, rows: int, s: float
) -> Trial:
    """What a model reaches on a sample within `s` seconds, in a process of its own.

    The process gets no secret. If it is far beyond its time, it is killed and counts as one that
    never saw its sample. Raises BadInput, TrainwrightError if it fails.
    """
    with tempfile.TemporaryDirectory(prefix="trainwright-trial-") as name:
        request = TrialRequest(
            data=data,
            home=str(settings.home),
            folder=str(model.unpack(Path(name))),
            entry=model.entry,
            train=train,
            rows=rows,
            limit_s=s,
        )
        command = [sys.executable, "-P", "-m", "trainwright.tasks.recommend.trials.trial"]
        most_s = _LATE * (_START_S + s)
        try:
            done = subprocess.run(
                dying_with_parent(command),
                input=request.model_dump_json(),
                env=scrubbed_environment(),
                capture_output=True,
                text=True,
                check=False,
                timeout=most_s,
            )
        except subprocess.TimeoutExpired:
            return Trial(error=math.inf, epochs=0, passes=0.0, seconds=most_s)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise TrainwrightError(f"recommend: a trial exited with {done.returncode}: {last}")
    answer = json.loads(done.stdout)
    if isinstance(answer.get("error"), dict):
        raise from_document(answer["error"])
    return Trial.model_validate_json(done.stdout)
