"""`AnalyzeOperator`: compare a run with earlier ones."""

from __future__ import annotations

from trainwright.operators.base import StepOperator


class AnalyzeOperator(StepOperator):
    """Compare this run with all earlier ones, and write a self-contained HTML report.

    The report shows curves, predicted and measured values, device use, energy, and earlier runs.

    | input | default | meaning |
    |---|---|---|
    | those of `StepOperator` | | |

    Returns `{"run", "artefact", "report", "runs_compared"}`.

    | failure | what Airflow does |
    |---|---|
    | a run that is not trained, a damaged artefact | fails without a retry |
    | unreachable service, another process holds the run, killed | retries |
    """

    step = "analyze"
