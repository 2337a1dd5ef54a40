"""In which order a stage of a pipeline computes its micro-batches.

The order depends on numbers only, so that every rank can derive it. In all of them, each kind of
pass takes the micro-batches in their order.

gpipe        all forward passes, then all backward passes (Y. Huang et al., arXiv:1811.06965)
1f1b         a backward pass as soon as there is one to do (D. Narayanan et al.,
             arXiv:1806.03377, without its stale weights)
zero-bubble  as 1f1b, but a backward pass computes only the gradients of inputs, which the stage
             before waits for; weight gradients follow where the stage would wait, or when it keeps
             as many micro-batches as the first stage of 1f1b (ZB-H1 of P. Qi et al.,
             arXiv:2401.10241)

A stage without others waits for none, so that it takes 1f1b in any case.
"""

from __future__ import annotations

from typing import NamedTuple

from trainwright.tasks.runs.artefacts.layout import StageSchedule
from trainwright.tasks.runs.artefacts.step_kinds import PassKind

DEFERRED_KINDS = ("Linear", "Conv1d", "Conv2d", "Conv3d")
"""Kinds of layers whose weight gradients can come later, with the schedule zero-bubble."""


class StagePass(NamedTuple):
    """A pass of a stage over a micro-batch."""

    kind: PassKind
    micro_batch: int


def passes_of(
    schedule: StageSchedule, stages: int, stage: int, micro_batches: int
) -> list[StagePass]:
    """The passes of stage number `stage` of `stages`, in order."""
    schedule = schedule if stages > 1 else "1f1b"
    if schedule == "gpipe":
        return [
            *(StagePass("forward", part) for part in range(micro_batches)),
            *(StagePass("backward", part) for part in range(micro_batches)),
        ]
    early = min(micro_batches, stages - stage)
    found = [StagePass("forward", part) for part in range(early)]
    if schedule == "1f1b":
        for part in range(micro_batches):
            found.append(StagePass("backward", part))
            if early + part < micro_batches:
                found.append(StagePass("forward", early + part))
        return found
    return [*found, *_split(early, min(micro_batches, stages), micro_batches)]


def _split(forward: int, most: int, micro_batches: int) -> list[StagePass]:
    """The rest of a stage's passes with weight gradients apart; `forward` ones are done.

    It keeps at most `most` micro-batches.
    """
    found, weights = list[StagePass](), 0
    for part in range(micro_batches):
        found.append(StagePass("input-gradient", part))
        if forward < micro_batches:
            if forward - weights >= most:
                found.append(StagePass("weight-gradient", weights))
                weights += 1
            found.append(StagePass("forward", forward))
            forward += 1
        else:
            found.append(StagePass("weight-gradient", weights))
            weights += 1
    return [*found, *(StagePass("weight-gradient", part) for part in range(weights, micro_batches))]


def in_flight(schedule: StageSchedule, stages: int, stage: int, micro_batches: int) -> int:
    """The most micro-batches of which a stage keeps what their backward passes need."""
    if schedule == "1f1b" or stages == 1:
        return min(micro_batches, stages - stage)
    return min(micro_batches, stages) if schedule == "zero-bubble" else micro_batches
