"""Names of the two columns of figures about labels that a checked table has beside its own."""

from __future__ import annotations

_ROWS, _SHARE = "rows with this ", "share of this "


def rows_of_label(target: str) -> str:
    """The name of the column with the number of rows that have the row's label."""
    return f"{_ROWS}{target}"


def share_of_label(target: str) -> str:
    """The name of the column with the share of rows that have the row's label."""
    return f"{_SHARE}{target}"


def target_of(column: str) -> str | None:
    """The target that such a column is about; None: it is no such column."""
    for start in (_ROWS, _SHARE):
        if column.startswith(start):
            return column.removeprefix(start)
    return None
