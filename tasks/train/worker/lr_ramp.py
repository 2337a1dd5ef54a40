"""The learning-rate search on a rank: a ramp, then short trials, all from the same start."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from trainwright.tasks.errors import TrainingFailed
from trainwright.tasks.train.batch.sampling import split_among
from trainwright.tasks.train.channel import Channel
from trainwright.tasks.train.rank.divergence import without_weight
from trainwright.tasks.train.rank.rank import Rank, StepFigures
from trainwright.tasks.train.worker import lr_trials
from trainwright.tasks.train.worker.lr_curve import runaway_rate
from trainwright.tasks.train.worker.snapshot import Snapshot
from trainwright.tasks.train.worker_group import WorkerGroup

DIVERGED = 3.0
SMOOTHING = 0.9
_BEGIN = 5


def begin_search(rank: Rank, group: WorkerGroup) -> None:
    """Split the batch among the group's members as planned; all take the first member's model.

    Each then holds its rows of sharded layers, in the search's snapshots too.
    """
    layout, planned = group.layout or rank.request.layout, rank.request.plan.shares
    if layout.has_stages:
        rank.split = planned
    else:
        rank.split = split_among(sum(planned), group.members, planned, group.limits) or planned
    if rank.is_cut:  # an earlier group was lost
        rank.hold_nothing()
    rank.adopt(layout)
    rank.begin_anew(group.members)
    rank.adapt()
    rank.take_state_from_first()
    rank.cut(group.members)


def search(
    rank: Rank, channel: Channel, learning_rates: list[float], trial_steps: int
) -> dict[str, Any]:
    """Raise the learning rate step by step until the loss diverges, then run trials at lower rates.

    `trial_steps`: length of a trial; 0 skips the trials. The result's `state` is the hash of the
    restored state (see `snapshot`). Raises TrainingFailed if it differs from the initial state.
    """
    start = Snapshot(rank)
    done, trials, tried = 0, list[dict[str, Any]](), dict[float, float]()

    def series(rates: Sequence[float]) -> tuple[list[dict[str, Any]], bool]:
        nonlocal done
        try:
            return _series(rank, channel, rates, done)
        finally:
            done += len(rates)
            start.restore(rank)

    points, stopped = series(learning_rates)
    if trial_steps and not stopped:
        edge = runaway_rate(
            [(one["learning_rate"], one["loss"], one["accuracy"]) for one in points]
        )
        while (
            edge is not None
            and not stopped
            and (rate := lr_trials.next_trial(edge, tried)) is not None
        ):
            found, stopped = series([rate] * trial_steps)
            tried[rate] = lr_trials.score([one["loss"] for one in found], trial_steps)
            trials.append({"learning_rate": rate, "loss": tried[rate], "steps": len(found)})
    if Snapshot(rank).digest() != start.digest():
        raise TrainingFailed("search_lr: the model's state could not be restored")
    return {"points": points, "trials": trials, "state": start.digest()}


def _series(
    rank: Rank, channel: Channel, learning_rates: Sequence[float], done: int
) -> tuple[list[dict[str, Any]], bool]:
    """Train one step at each rate, starting with the training's first batch.

    Returns loss and accuracy before each update, and whether a stop was requested. Ends early if
    the loss is not finite, or its smoothed value exceeds the minimum by DIVERGED times the larger
    of the minimum and the initial loss.
    """
    points: list[dict[str, Any]] = []
    smoothed, best = 0.0, math.inf
    batches = _Batches(rank)
    for step, rate in enumerate(learning_rates):
        found = batches.step(rate)
        if found.stop or found.loss is None:
            return points, True
        accuracy = found.correct / found.samples if rank.classifies else None
        points.append({"learning_rate": rate, "loss": found.loss, "accuracy": accuracy})
        if not math.isfinite(found.loss):
            break
        smoothed = SMOOTHING * smoothed + (1 - SMOOTHING) * found.loss
        unbiased = smoothed / (1 - SMOOTHING ** (step + 1))
        best = min(best, unbiased)
        first = [one["loss"] for one in points[:_BEGIN]]
        if unbiased > best + DIVERGED * max(abs(best), abs(math.fsum(first) / len(first))):
            break
        rank.update(rate)
        rank.average_if_due()
        if rank.first:
            channel.progress("ramp", step=done + step + 1, learning_rate=rate, loss=found.loss)
    return points, False


class _Batches:
    """A training's batches from its first one on."""

    def __init__(self, rank: Rank) -> None:
        self._rank, self._order = rank, None
        self._step = self._samples = 0

    def step(self, rate: float) -> StepFigures:
        """Train a step up to its update; of batches without a weight in the loss, no more.

        Its loss is None only if a stop was requested. Raises BadInput if no batch of an epoch has a
        weight.
        """
        rank, passed = self._rank, 0
        rank.learning_rate = rate
        while passed < len(rank.train_rows):
            epoch, begin = divmod(self._samples, len(rank.train_rows))
            if begin == 0:
                self._order = rank.epoch_order(epoch)
            found = rank.step(self._order, begin, self._step)
            self._samples += found.samples
            self._step += 1
            if found.stop or found.loss is not None:
                return found
            rank.update(rate)
            passed += found.samples
        raise without_weight(f"{passed} training samples")
