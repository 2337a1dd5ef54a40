"""The comparison of a job's data with an earlier run's, as a table."""

from __future__ import annotations

from trainwright.tasks.cli.screens import console
from trainwright.tasks.runs.artefacts.data_profile import Drift
from trainwright.tasks.validate.drift.compare_profiles import WORDS


def show_drift(drift: Drift | None) -> None:
    """Print each column's largest difference; nothing if drift is off."""
    if drift is None:
        return
    if drift.reference is None:
        console.out.print("drift: no earlier run to compare with")
        return
    rows = [
        (
            "drifted" if one.drifted else "same",
            one.column,
            WORDS[one.statistic],
            f"{one.value:.3g}",
            f"{one.threshold:.3g}",
        )
        for one in drift.columns
    ]
    head = ("", "column", "largest difference", "value", "threshold")
    console.table(f"drift from {drift.reference}", head, rows, right=(3, 4))
