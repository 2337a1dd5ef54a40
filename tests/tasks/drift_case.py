"""A drift of one column, for the tests of pages that show it."""

from __future__ import annotations

from trainwright.tasks.runs.artefacts.data_profile import ColumnDrift, Drift, Histogram


def drifted(reference: str, column: str, category: str) -> Drift:
    """The drift of a column whose second category is the given one."""
    shares = Histogram(
        ordered=False, labels=["a", category], now=[0.75, 0.25], reference=[0.5, 0.5]
    )
    found = ColumnDrift(
        column=column,
        drifted=True,
        statistic="psi",
        value=0.275,
        threshold=0.1,
        values={"psi": 0.275},
        thresholds={"psi": 0.1},
        histogram=shares,
    )
    return Drift(reference=reference, columns=[found])
