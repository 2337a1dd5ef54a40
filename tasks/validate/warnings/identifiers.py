"""Columns of a table that name its rows: another text in each of them.

A model can't learn anything about other rows from such a column, but it can learn rows by heart.
"""

from __future__ import annotations

from trainwright.tasks.runs.artefacts.data_schema import DataSchema
from trainwright.tasks.runs.artefacts.validation import DataWarning
from trainwright.tasks.validate.duckdb_table import DuckDBTable, quoted

_LEAST_ROWS = 20
"""In a smaller table, categories may all differ by chance."""


def identifiers(table: DuckDBTable, schema: DataSchema) -> list[DataWarning]:
    """A warning for each category column whose values all differ, beside other inputs."""
    names = [one.name for one in schema.columns if one.kind == "category"]
    if table.rows < _LEAST_ROWS or not names or len(schema.columns) == 1:
        return []
    asked = ", ".join(f"count({quoted(name)}), count(DISTINCT {quoted(name)})" for name in names)
    counts = [column[0].as_py() for column in table.arrow(f"SELECT {asked} FROM plain").columns]
    return [
        DataWarning(
            kind="identifier",
            column=name,
            message="has another value in each row that has one, and tells nothing of other rows; "
            f"data.ignore: [{name}] leaves it out",
        )
        for name, given, distinct in zip(names, counts[::2], counts[1::2], strict=True)
        if given == distinct >= _LEAST_ROWS
    ]
