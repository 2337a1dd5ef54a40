"""Train on the leased devices."""

from __future__ import annotations

from trainwright.operators.base import StepOperator


class TrainOperator(StepOperator):
    """Train on the leased, unlike devices: one rank each, with its own batch and share of the CPU; gradients weighted.

    A run that was interrupted goes on from its newest checkpoint. Killing the task saves a checkpoint and stops the ranks.
    """

    step = "train"
