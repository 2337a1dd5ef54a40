"""An action: one thing that a rank does in a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainwright.tasks.allocate.actions.chunks import GradientChunk

Compute = Literal["forward", "input-gradient", "weight-gradient", "update", "recompute"]
Transfer = Literal["gather", "exchange", "scatter-sum", "sum", "average", "agree"]
PointToPoint = Literal["send", "receive"]
ActionKind = Compute | Transfer | PointToPoint | Literal["wait"]
COMPUTE: tuple[Compute, ...] = (
    "forward",
    "input-gradient",
    "weight-gradient",
    "update",
    "recompute",
)
TRANSFERS: tuple[Transfer, ...] = (
    "gather",
    "exchange",
    "scatter-sum",
    "sum",
    "average",
    "agree",
)
"""what all ranks of a group do together"""
MESSAGES: tuple[PointToPoint, ...] = ("send", "receive")
"""from one rank to another"""
ACTIVATIONS, GRADIENTS = "activations", "gradients"
"""What a message carries: the first word of its name."""


@dataclass(frozen=True)
class Action:
    """One thing that a rank does.

    A transfer is matched with those of the other ranks of its `group` by `name`. If it is
    `started`, the rank goes on at once, and a later `wait` of the same name ends it. The group of a
    message is (sender, receiver). A send is started, and has no wait: the receive of its name on
    the other rank waits for it.
    """

    kind: ActionKind
    name: str
    layer: str = ""
    """of a message: the unit after which the model is cut"""
    micro_batch: int = 0
    group: tuple[int, ...] = ()
    started: bool = False
    chunk: GradientChunk | None = None
    """of a sum: the gradients"""
    joint: bool = False
    """of a computation: whether it is of the joint batch, not of the rank's own samples"""
    begins: bool = False
    """of a computation: whether it is the first one of a stage's pass over a micro-batch"""
