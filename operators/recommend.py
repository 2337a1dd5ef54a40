"""`RecommendOperator`: choose a model for data, and generate its code."""

from __future__ import annotations

from trainwright.operators.base import StepOperator


class RecommendOperator(StepOperator):
    """Recommend a model for the run's data, and write its code into the run.

    A job that names its model keeps it: the step then only says so. Otherwise the candidates are
    ranked by their predicted metric, and those that miss the job's limits come last.

    | input | default | meaning |
    |---|---|---|
    | those of `StepOperator` | | |

    Returns `{"run", "artefact", "chosen", "reason", "candidates"}`.

    | failure | what Airflow does |
    |---|---|
    | no template for the data, no candidate keeps the limits, bad input | fails without a retry |
    | unreachable service, another process holds the run, killed | retries |
    """

    step = "recommend"
