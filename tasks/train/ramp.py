"""The ramp of the learning rate: a few steps on the real model, data and split, after which the rank is as it was before."""

from __future__ import annotations

import math
from typing import Any

from trainwright.tasks.train.batches import epoch_order
from trainwright.tasks.train.channel import RankChannel
from trainwright.tasks.train.rank import Rank
from trainwright.tasks.train.snapshot import Snapshot

DIVERGED = 4.0
SMOOTHING = 0.9


def ramp(rank: Rank, channel: RankChannel, learning_rates: list[float]) -> dict[str, Any]:
    """Raise the learning rate step by step; loss and accuracy before each update, until the loss runs away.

    `state` is the hash of parameters, buffers, optimizer and random numbers before the first step and after all is put back.
    """
    kept = Snapshot(rank)
    before = kept.digest()
    try:
        points = _points(rank, channel, learning_rates)
    finally:
        kept.restore(rank)
    return {"points": points, "state": {"before": before, "after": Snapshot(rank).digest()}}


def _points(rank: Rank, channel: RankChannel, learning_rates: list[float]) -> list[dict[str, Any]]:
    points: list[dict[str, Any]] = []
    smoothed, best, samples = 0.0, math.inf, 0
    for step, rate in enumerate(learning_rates):
        epoch, begin = divmod(samples, len(rank.train_rows))
        if begin == 0:
            order = epoch_order(rank.train_rows, rank.spec.seed, epoch)
        found = rank.step(order, begin, step)
        samples += found.samples
        if found.stop:
            break
        accuracy = found.correct / found.samples if rank.classifies else None
        points.append({"learning_rate": rate, "loss": found.loss, "accuracy": accuracy})
        if not math.isfinite(found.loss):
            break
        smoothed = SMOOTHING * smoothed + (1 - SMOOTHING) * found.loss
        unbiased = smoothed / (1 - SMOOTHING ** (step + 1))
        best = min(best, unbiased)
        if unbiased > DIVERGED * best:
            break
        rank.update(rate)
        if rank.rank == 0:
            channel.progress("ramp", step=step + 1, steps=len(learning_rates), learning_rate=rate, loss=found.loss)
    return points
