"""How far a training is, and how long the rest takes at the pace of its latest epochs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

_LATEST = 3
"""Epochs, whose pace counts."""
_STEPS = 50
"""Steps whose pace counts before an epoch has ended."""


def progress_of(
    recorded: Mapping[str, Any], steps_per_epoch: int, epochs: int
) -> dict[str, Any] | None:
    """Step, epoch, share and seconds left of what `live.recorded` gives; None before a step.

    An epoch's duration includes its validation and checkpoints. `left_s` is None if no pace is
    known. A training that stops early ends sooner.
    """
    newest = recorded["newest"]
    if not newest or steps_per_epoch < 1:
        return None
    last = max(newest, key=lambda row: row["step"])
    steps = steps_per_epoch * epochs
    done = min(last["step"] + 1, steps)
    pace_s = _step_s(recorded["epochs"], recorded["rows"], steps_per_epoch)
    return {
        "step": done,
        "steps": steps,
        "epoch": min(int(last["epoch"]) + 1, epochs),
        "epochs": epochs,
        "share": done / steps,
        "left_s": None if pace_s is None else pace_s * (steps - done),
    }


def _step_s(
    epochs: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]], steps_per_epoch: int
) -> float | None:
    """Seconds for a step, with its part of what an epoch takes besides steps."""
    durations = [row["duration_s"] for row in epochs[-_LATEST:] if row.get("duration_s")]
    if durations:
        return float(statistics.median(durations)) / steps_per_epoch
    slowest: dict[int, float] = {}
    for row in rows:
        slowest[row["step"]] = max(slowest.get(row["step"], 0.0), row["step_time_s"])
    latest = [slowest[step] for step in sorted(slowest)[-_STEPS:]]
    return statistics.median(latest) if latest else None
