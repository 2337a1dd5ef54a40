"""Warns of labels that disagree with all near rows: candidates for wrong labels.

A row of a numeric table is a candidate if its ten nearest neighbours all have one other class.
Only said if neighbours usually agree: if the class of most of them is right for nine of ten rows.
At most 4,000 rows are compared, by Euclidean distance of columns scaled to quartiles.
"""

# ruff: noqa: TID253 -- only loaded by tasks.validate.expectations, in a separate process

from __future__ import annotations

import numpy as np
from sklearn.neighbors import NearestNeighbors

from trainwright.tasks.runs.artefacts.validation import DataWarning
from trainwright.tasks.validate.duckdb_table import DuckDBTable
from trainwright.tasks.validate.warnings.leakage import Sampled
from trainwright.tasks.validate.warnings.repeated_rows import NAMED

MOST_ROWS = 4_000
NEIGHBOURS = 10
USUALLY_RIGHT = 0.9
_MIN_ROWS = 200


def doubtful_labels(table: DuckDBTable, sampled: Sampled, target: str) -> list[DataWarning]:
    """The warning of a table with classes and numbers; none for other tables or few rows."""
    names = [name for name in sampled.columns if name != target and table.kinds[name] == "number"]
    labels = sampled.columns.get(target)
    if table.labels is None or labels is None or not names or len(sampled.rows) < _MIN_ROWS:
        return []
    whole = len(sampled.rows)
    chosen = np.linspace(0, whole - 1, min(whole, MOST_ROWS)).astype(np.int64)
    inputs = np.stack([sampled.columns[name][chosen].astype(np.float64) for name in names], 1)
    _, classes = np.unique(labels[chosen].astype(str), return_inverse=True)
    usable = np.isfinite(inputs).all(axis=1)
    inputs, classes, rows = inputs[usable], classes[usable], sampled.rows[chosen][usable]
    if len(rows) < _MIN_ROWS:
        return []
    low, middle, high = np.quantile(inputs, [0.25, 0.5, 0.75], axis=0)
    scaled = np.clip((inputs - middle) / np.where(high > low, high - low, 1.0), -10, 10)
    near = NearestNeighbors(n_neighbors=NEIGHBOURS).fit(scaled).kneighbors(return_distance=False)
    votes = classes[near]
    usual = np.array([np.bincount(row).argmax() for row in votes])
    agreed = (votes == votes[:, :1]).all(axis=1)
    doubtful = np.flatnonzero(agreed & (usual != classes))
    if not len(doubtful) or (usual == classes).mean() < USUALLY_RIGHT:
        return []
    message = (
        f"{len(doubtful):,} of {len(rows):,} compared rows have another class than all their "
        f"{NEIGHBOURS} nearest neighbours, which agree: their labels may be wrong"
    )
    found = [int(row) for row in rows[doubtful][:NAMED]]
    return [DataWarning(kind="label_noise", message=message, rows=found, count=len(doubtful))]
