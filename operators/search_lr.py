"""`SearchLearningRateOperator`: find the learning rate."""

from __future__ import annotations

from trainwright.operators.base import StepOperator


class SearchLearningRateOperator(StepOperator):
    """Find the learning rate on the leased devices, with the job's model and data.

    A ramp raises the rate until the loss diverges; short trainings below that rate are then
    compared. Stores the chosen rate, the interval and a plot.

    | input | default | meaning |
    |---|---|---|
    | those of `StepOperator` | | |

    Returns `{"run", "artefact", "learning_rate", "interval", "source"}`.

    | failure | what Airflow does |
    |---|---|
    | a model or loss that fails, bad input | fails without a retry |
    | unreachable service, another process holds the run, killed | retries |
    """

    step = "search_lr"
