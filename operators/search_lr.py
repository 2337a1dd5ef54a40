"""Find a learning rate."""

from __future__ import annotations

from trainwright.operators.base import StepOperator


class SearchLearningRateOperator(StepOperator):
    """Find the learning rate by an exponential ramp on the real model and data, on the leased devices.

    Fits polynomial and logarithmic curves to the loss and the training accuracy, and stores interval, value and plot.
    """

    step = "search_lr"
