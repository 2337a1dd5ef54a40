"""Whether a generated model file, edited or not, was made for the columns of a job's data.

The file names its columns in constants: a table's NUMBERS and CATEGORIES, a forecast's KNOWN.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from trainwright.tasks.data.tables.table_source import listed
from trainwright.tasks.errors import BadInput
from trainwright.tasks.runs.artefacts.data_schema import DataSchema

_GENERATED = re.compile(r"^Digest: [0-9a-f]{64}\.", re.MULTILINE)
_LISTS = {
    "tabular": {"number": "NUMBERS", "category": "CATEGORIES"},
    "forecasting": {"number": "KNOWN"},
}
"""By task, or the first word of several: the constant that names the columns of a kind."""


def require_generated_columns(source: str, entry: str, schema: DataSchema) -> None:
    """Raise BadInput if a generated file is for other columns, or for the same in another order.

    Other files pass, and so do lists that are no literals.
    """
    lists = _LISTS.get(schema.task.partition("-")[0], {})
    if not lists or _GENERATED.search(source) is None:
        return
    constants = _constants(source)
    for kind, name in lists.items():
        made_for = constants.get(name, [] if schema.task == "forecasting" else None)
        has = [one.name for one in schema.columns if one.kind == kind]
        if made_for is None or made_for == has:
            continue
        kinds = {"number": "columns of numbers", "category": "columns of texts"}[kind]
        raise BadInput(
            f"model.source: {entry} was made for the {kinds} {listed(made_for) or '(none)'}; the "
            f"data has {listed(has) or 'none'}; allowed: the columns that it was made for, in this "
            "order, or a file that `trainwright recommend` makes for this job"
        )


def _constants(source: str) -> dict[str, list[str]]:
    """The lists of texts that a module assigns to annotated names."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError):
        return {}
    found = {}
    for one in body:
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            value = _literal(one.value)
            if isinstance(value, list) and all(isinstance(text, str) for text in value):
                found[one.target.id] = value
    return found


def _literal(value: ast.expr | None) -> Any:
    """The value of a literal, or of `json.loads` of one; None for anything else."""
    if value is None:
        return None
    try:
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "json.loads":
            return json.loads(ast.literal_eval(value.args[0]))
        return ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError, IndexError, RecursionError):
        return None
