"""Analyse a run beside the earlier ones."""

from __future__ import annotations

from trainwright.operators.base import StepOperator


class AnalyzeOperator(StepOperator):
    """Analyse this run and all earlier ones with Dask, and write a self-contained report.

    Shows curves, predicted against measured, device use, energy, and the comparison with earlier runs.
    """

    step = "analyze"
