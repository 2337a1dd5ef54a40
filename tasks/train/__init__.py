"""Step `train`: one rank per device of the plan, each with its own batch and CPU share.

    launcher/    starts ranks, exchanges messages with them, collects the result
    membership/  which ranks train together, restart or are killed: a pure state machine
    hosts/       ranks on other hosts
    worker/      a rank's process: start, training loop, learning-rate ramp
    exchange/    how ranks find each other and sum tensors
    rank/        a rank's work within a step
    batch/       which samples a rank takes; how the batch is split and grows
    checkpoint/  what a checkpoint holds, and how it reaches the store
    record/      metrics, events, timings, TensorBoard

Callers use `train` and `search` (`ramp` is a search without trials).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainwright.tasks.lazy import exports

if TYPE_CHECKING:
    from trainwright.tasks.train.launcher.launch import ramp, search, train
    from trainwright.tasks.train.request import RampPoint, Searched, TrainRequest

__all__ = ["RampPoint", "Searched", "TrainRequest", "ramp", "search", "train"]

__getattr__ = exports(
    __name__,
    {
        "ramp": "launcher.launch",
        "search": "launcher.launch",
        "train": "launcher.launch",
        "RampPoint": "request",
        "Searched": "request",
        "TrainRequest": "request",
    },
)
