"""Find a learning rate."""

from __future__ import annotations

from trainwright.operators.base import StepOperator


class SearchLearningRateOperator(StepOperator):
    """Find the learning rate by an exponential ramp on the real model and data, on the leased devices.

    Fits polynomial and logarithmic curves to the loss and the training accuracy, and stores interval, value and plot.

    | input | default | meaning |
    |---|---|---|
    | those of `StepOperator` | | |

    Returns `{"run", "artefact", "learning_rate", "interval", "source"}`.

    | failure | what Airflow does |
    |---|---|
    | a model or loss that fails, bad input | fails at once, no retry |
    | a service out of reach, the run held by another, killed | fails; retried as `retries` say |
    """

    step = "search_lr"
