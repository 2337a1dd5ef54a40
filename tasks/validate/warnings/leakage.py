"""Warns of a column that gives the target away: equal to it, its function, or a telling identifier.

The measure is skill: how well the column alone predicts the target in held-out rows, from 0 (no
better than always the same answer) to 1 (always right). For classes it is the share of errors
removed, for quantities R² of their ranks. The prediction is the most frequent class, or the mean
rank, of training rows with the same value; numbers are put into 256 bins with as many rows. It is
measured on at most 100,000 rows, of which half are held out. Relations that it suggests are
verified on all rows.
"""

# ruff: noqa: TID253 -- only loaded by tasks.validate.expectations, in a separate process

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from trainwright.tasks.runs.artefacts.validation import DataWarning
from trainwright.tasks.validate.duckdb_table import ROW, DuckDBTable, quoted
from trainwright.tasks.validate.warnings.repeated_rows import NAMED

LEAK_SKILL = 0.99
ID_SKILL = 0.5
"""An identifier, which has another value in each row, should predict nothing."""
MIN_ROWS = 100
_MOST_ROWS = 100_000
_MOST_CELLS = 5_000_000
_BINS = 256
_FEW = 1_000

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Sampled:
    """Rows of a table by column: the values, and the rows' numbers."""

    columns: dict[str, Array]
    rows: Array


def sample(table: DuckDBTable, most: int = _MOST_ROWS) -> Sampled:
    """The same rows of a table each time: those with the smallest hashes of their number."""
    rows = max(MIN_ROWS, min(most, _MOST_CELLS // max(1, len(table.kinds))))
    share = min(1.0, rows / max(1, table.rows))
    names = [name for name, kind in table.kinds.items() if kind != "other"]
    listed = "".join(f"{quoted(name)}, " for name in names)
    found = table.arrow(
        f'SELECT {listed}"{ROW}" FROM numbered '
        f'WHERE hash("{ROW}") <= {min(2**64 - 1, int(share * 2**64))}::UBIGINT'
    )
    columns = {name: found.column(name).to_pandas().to_numpy() for name in names}
    return Sampled(columns, found.column(ROW).to_numpy())


def leakage(table: DuckDBTable, sampled: Sampled, target: str) -> list[DataWarning]:
    """Warnings of columns with too much skill. None below 100 rows."""
    quantity = table.kinds.get(target) in ("number", "flag")
    if len(sampled.rows) < MIN_ROWS or target not in sampled.columns:
        return []
    if table.labels is None and not quantity:
        return []
    classes = table.labels is not None
    answers = sampled.columns[target]
    present = ~_missing(answers) if classes else np.isfinite(answers.astype(np.float64))
    answers = _codes(answers[present])  # classes, or ranks
    if not len(answers):
        return []
    held_out = np.random.Generator(np.random.PCG64(0)).permutation(len(answers)) % 2 == 0
    found = []
    for name, values in sampled.columns.items():
        if name == target:
            continue
        column = values[present]
        skill = _skill(_binned(column, held_out), answers, held_out, classes=classes)
        identifier = _is_identifier(column, table.kinds[name])
        if skill >= (ID_SKILL if identifier else LEAK_SKILL):
            message = _message(table, name, target, column, skill, identifier)
            rows = [int(row) for row in sampled.rows[present]]
            found.append(
                DataWarning(
                    kind="leakage",
                    column=name,
                    message=message,
                    rows=rows[:NAMED],
                    count=len(rows),
                )
            )
    return found


def _skill(column: Array, answers: Array, held_out: Array, *, classes: bool) -> float:
    """The skill of a column of codes, from 0 to 1."""
    train, test = ~held_out, held_out
    codes = int(column.max()) + 1
    if classes:
        kinds = int(answers.max()) + 1
        counts = np.bincount(answers[train], minlength=kinds)
        usual = int(counts.argmax())
        pairs = np.unique(column[train] * kinds + answers[train], return_counts=True)
        best = np.full(codes, usual)
        order = np.argsort(pairs[1], kind="stable")  # the most frequent class of a code is last
        best[pairs[0][order] // kinds] = pairs[0][order] % kinds
        wrong = float((answers[test] != usual).mean())
        return 1 - float((best[column[test]] != answers[test]).mean()) / wrong if wrong else 0.0
    answers = answers.astype(np.float64)
    mean = answers[train].mean()
    sums = np.bincount(column[train], answers[train] - mean, codes)
    means = mean + sums / np.maximum(1, np.bincount(column[train], minlength=codes))
    spread = float(((answers[test] - mean) ** 2).sum())
    missed = float(((answers[test] - means[column[test]]) ** 2).sum())
    return 1 - missed / spread if 0 < spread < np.inf else 0.0


def _binned(column: Array, held_out: Array) -> Array:
    """Codes of a column: of its values if they are few, else of bins of the training half's."""
    codes = _codes(column)
    if codes.max() < _BINS:
        return codes
    edges = np.unique(np.quantile(codes[~held_out], np.linspace(0, 1, _BINS + 1)[1:-1]))
    return np.searchsorted(edges, codes)


def _codes(values: Array) -> Array:
    """Each value's place among the distinct values in order; missing ones come first."""
    missing = _missing(values)
    codes = np.zeros(len(values), np.int64)
    present = values[~missing]
    kept = present.astype(str) if present.dtype == object else present
    codes[~missing] = np.unique(kept, return_inverse=True)[1] + 1
    return codes


def _missing(values: Array) -> Array:
    if values.dtype == object:
        return np.array([value is None or value != value for value in values])
    return np.isnan(values) if values.dtype.kind == "f" else np.zeros(len(values), bool)


def _is_identifier(column: Array, kind: str) -> bool:
    whole = kind == "text" or column.dtype.kind in "iu"
    return whole and len(np.unique(_codes(column))) == len(column)


def _message(
    table: DuckDBTable, name: str, target: str, column: Array, skill: float, identifier: bool
) -> str:
    """What is known of a suspected column; relations are verified on all rows."""
    x, y = quoted(name), quoted(target)
    words = f"it alone predicts the target with a skill of {skill:.2f} (1: always right)"
    if table.kinds[name] == table.kinds[target]:
        ((differing,),) = table.query(f"SELECT count(*) FROM plain WHERE {x} IS DISTINCT FROM {y}")
        if not differing:
            return "it equals the target in all rows"
    if len(np.unique(_codes(column))) <= _FEW:
        ((values, answers, pairs),) = table.query(
            f"SELECT count(DISTINCT {x}), count(DISTINCT {y}), count(DISTINCT ({x}, {y})) "
            f"FROM plain WHERE {x} IS NOT NULL AND {y} IS NOT NULL"
        )
        if values == answers == pairs:
            return "it is the target under other names: each value stands for one of the target's"
        if values == pairs:
            return f"each of its {values:,} values has one value of the target only; {words}"
    if identifier:
        return f"it has another value in each row, as an identifier, but {words}"
    return words
