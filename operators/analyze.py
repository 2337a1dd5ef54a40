"""Analyse a run beside the earlier ones."""

from __future__ import annotations

from trainwright.operators.base import StepOperator


class AnalyzeOperator(StepOperator):
    """Analyse this run and all earlier ones with Dask, and write a self-contained report.

    Shows curves, predicted against measured, device use, energy, and the comparison with earlier runs.

    | input | default | meaning |
    |---|---|---|
    | those of `StepOperator` | | |

    Returns `{"run", "artefact", "report", "runs_compared"}`.

    | failure | what Airflow does |
    |---|---|
    | a run that is not trained, a damaged artefact | fails at once, no retry |
    | a service out of reach, the run held by another, killed | fails; retried as `retries` say |
    """

    step = "analyze"
