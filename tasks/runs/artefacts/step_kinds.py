"""A device's part of a step by kind of action, as predicted or as measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from pydantic import Field

from trainwright.tasks.runs.value import Value

ComputeKind = Literal["forward", "backward", "late gradient", "update", "loop"]
"""late gradient: products of gathered factors. loop: what the training adds to the model's step."""
WaitKind = Literal["exchange", "agree", "sum", "gather", "average"]
"""exchange: parts of sharded layers, statistics of batch normalisation. agree: the small sum in
which the fast ranks wait for the slow. sum: of gradients. gather: of factors."""
PassKind = Literal["forward", "backward", "input-gradient", "weight-gradient"]
"""backward: gradients of inputs and weights in one pass."""
SentKind = Literal["sum", "transfer"]
"""sum: by the ring's formula, 2 (n − 1) / n of the summed bytes. transfer: all other messages."""


class MeasuredPass(Value):
    """A stage's pass over a micro-batch in one step."""

    kind: PassKind = Field(description="forward, backward or a gradient")
    micro_batch: int = Field(description="its number")
    begin_s: float = Field(description="since the rank's step began; after what it waited for")
    end_s: float = Field(description="since the step began")


class StepByKind(Value):
    """What a device does in a step: seconds and bytes by kind of action. Together they are it."""

    device: str = Field(description="the device's id")
    compute_s: dict[ComputeKind, float] = Field(description="seconds of computing, by kind")
    wait_s: dict[WaitKind, float] = Field(description="seconds of waiting, by kind")
    sent_bytes: dict[SentKind, float] = Field(description="bytes sent, by kind")
    passes: list[MeasuredPass] = Field(
        default_factory=list,
        description="of a stage of a pipeline: those of the latest whole step, as measured",
    )


def mean_by_kind(found: Sequence[StepByKind]) -> dict[tuple[str, str], float]:
    """The mean over devices, by quantity and kind. Empty without devices."""
    means = {}
    for field, kinds in (
        ("compute_s", get_args(ComputeKind)),
        ("wait_s", get_args(WaitKind)),
        ("sent_bytes", get_args(SentKind)),
    ):
        for kind in kinds if found else ():
            means[field, kind] = sum(getattr(one, field).get(kind, 0.0) for one in found) / len(
                found
            )
    return means
