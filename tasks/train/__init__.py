"""Step `train`: one rank for each device of the plan, each with its own batch and share of the CPU.

    launcher/    starts ranks, carries messages to and from them, collects the result
    membership/  which ranks train together, are restarted or killed: a pure state machine
    hosts/       the same for ranks on other hosts
    worker/      a rank's process: start, loop over steps, learning-rate ramp
    exchange/    how ranks find each other and sum tensors
    rank/        what a rank does within a step
    batch/       which samples a rank takes, and how the batch is split and grows
    checkpoint/  what is kept, and how it reaches the store
    record/      metrics, events, timings, TensorBoard

`train` and `search` are what a caller needs (`ramp` is a search without trials).
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
