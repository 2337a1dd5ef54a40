"""`ExportOperator`: write a finished model in forms that need no torch."""

from __future__ import annotations

from trainwright.operators.base import StepOperator


class ExportOperator(StepOperator):
    """Export the run's model in the forms that its job names (`export`), and compare each with it.

    Without `export` in the job there is nothing to do.

    | input | default | meaning |
    |---|---|---|
    | those of `StepOperator` | | |

    Returns `{"run", "artefact", "kinds"}`; the files are in the run's folder, below `export/`.

    | failure | what Airflow does |
    |---|---|
    | a model that can't be exported, a damaged run, a missing package | fails without a retry |
    | unreachable service, another process holds the run, killed | retries |
    """

    step = "export"
