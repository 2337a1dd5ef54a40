"""The process that checks data with Great Expectations.

Usage: `python -m trainwright.tasks.validate.expectations REQUEST RESPONSE`.

`tasks.validate.check` starts it, because the import takes seconds and hundreds of megabytes. Both
arguments are JSON files. The request has `data` (a DataSpec), `seed`, `suite_source` and `suite`.
The response is a Validation, or `{"error": …}` if the data can't be read or the suite is
invalid.

A table is checked exactly, over DuckDB (`duckdb_table`). Images and other arrays are checked by a
frame of figures, one row per sample (`sample_frame`).
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from trainwright.tasks.data.dataset import describe, from_raw
from trainwright.tasks.data.formats import Raw
from trainwright.tasks.data.sources import read
from trainwright.tasks.data.stored_rows import task_of
from trainwright.tasks.data.tables.table_source import pandas_index
from trainwright.tasks.errors import BadInput, TrainwrightError
from trainwright.tasks.runs.artefacts.data_profile import DataProfile
from trainwright.tasks.runs.artefacts.data_schema import DataSchema
from trainwright.tasks.runs.artefacts.validation import DataWarning, Expectation, Validation
from trainwright.tasks.spec.data_spec import DataSpec, Task
from trainwright.tasks.validate.column_summary import of_labels, of_series
from trainwright.tasks.validate.drift.profile import BATCH_ROWS, profile
from trainwright.tasks.validate.drift.random_halves import with_noise
from trainwright.tasks.validate.drift.source_profile import source_profile
from trainwright.tasks.validate.duckdb_table import DuckDBTable, can_hold, quoted
from trainwright.tasks.validate.gx_run import plain, run_on_frame, run_on_table
from trainwright.tasks.validate.label_columns import rows_of_label, share_of_label
from trainwright.tasks.validate.sample_frame import make_frame
from trainwright.tasks.validate.suite import Config, infer_suite
from trainwright.tasks.validate.table_files import table_files
from trainwright.tasks.validate.warnings.data_warnings import sample_warnings, table_warnings

MadeOfData = TypeVar("MadeOfData")
SuiteSource = Literal["given", "kept", "inferred"]

SAMPLE_ROWS = 5
SAMPLE_COLUMNS = 12
USABLE = "data_to_be_usable_for_training"
"""Our own expectation: `tasks.data` can make arrays of the data."""


@dataclass(frozen=True)
class Checked:
    """Data that Great Expectations has checked. `samples`: values of the failing rows."""

    suite: list[Config]
    result: dict[str, Any]
    columns: list[str]
    samples: dict[int, dict[str, Any]]
    rows: int
    profile: DataProfile
    warnings: list[DataWarning]
    schema: DataSchema | None
    problem: str | None
    """why there is no schema"""


def check(spec: DataSpec, seed: int, source: SuiteSource, suite: list[Config]) -> Validation:
    """Read the data and check it with the suite, or with an inferred one. Raises BadInput."""
    with tempfile.TemporaryDirectory(prefix="trainwright-table-") as folder:
        files = table_files(spec, Path(folder))
        if files is None or not can_hold(files, spec.target):
            return _validation(_check_samples(spec, seed, source, suite), spec, source)
        index = pandas_index(files[0], spec.named_columns)
        table = DuckDBTable(files, Path(folder), index)
        try:
            return _validation(_check_table(table, spec, seed, source, suite), spec, source)
        finally:
            table.close()


def _check_table(
    table: DuckDBTable, spec: DataSpec, seed: int, source: SuiteSource, suite: list[Config]
) -> Checked:
    known = spec.target in table.kinds
    schema, problem = _made(lambda: describe(spec, seed))
    if not known and table.rows and source == "inferred":
        raise BadInput(problem or f"data.target: got {spec.target!r}; it is not a column")
    task = _task(table, spec, schema) if known else spec.task or "custom"
    classes = known and task.endswith("classification")
    table.add_labels(spec.target, classes=classes)
    if source == "inferred":
        suite = infer_suite(table.summaries(), table.labels, table.rows, spec, table=True)
    derived = table.derived if source != "given" or _names(suite, table.derived) else ()
    result = run_on_table(table, suite, derived=bool(derived))
    columns = [*table.kinds, *derived]
    samples = table.sample(sorted(_failing(result)), columns)
    found = profile(table.batches("plain", BATCH_ROWS), spec.target, classes=classes)
    warnings = table_warnings(table, spec, seed, schema) if known else []
    rows = table.rows
    return Checked(
        suite, result, columns, samples, rows, with_noise(found), warnings, schema, problem
    )


def _names(suite: list[Config], columns: Sequence[str]) -> bool:
    """Whether a suite names one of these columns, as one that was inferred here does."""
    named = [
        name
        for one in suite
        for name in (one["kwargs"].get("column"), *(one["kwargs"].get("column_set") or ()))
    ]
    return any(name in columns for name in named)


def _made(made: Callable[[], MadeOfData]) -> tuple[MadeOfData | None, str | None]:
    """The value, or why no arrays can be made of the data."""
    try:
        return made(), None
    except BadInput as error:
        return None, str(error)


def _task(table: DuckDBTable, spec: DataSpec, schema: DataSchema | None) -> Task:
    """The job's task, or the inferred one, which depends on the target's values only."""
    if schema is not None:
        return schema.task
    target = table.arrow(f"SELECT {quoted(spec.target)} FROM plain")
    return task_of(Raw(sha256="", table=target), spec)


def _check_samples(spec: DataSpec, seed: int, source: SuiteSource, suite: list[Config]) -> Checked:
    raw = read(spec)
    known = raw.targets is not None or spec.target in raw.table.column_names
    dataset, problem = _made(lambda: from_raw(raw, spec, seed))
    if not known and raw.rows and source == "inferred":
        raise BadInput(str(problem))
    task = task_of(raw, spec) if known else spec.task or "custom"
    frame = make_frame(raw, spec.target, task)
    derived = [rows_of_label(spec.target), share_of_label(spec.target)]
    if source == "given" and raw.is_table and not _names(suite, derived):
        frame = frame.drop(columns=derived, errors="ignore")
    elif source == "inferred":
        summaries = [of_series(frame[name]) for name in frame if name not in derived]
        labels = of_labels(frame[spec.target], raw.rows) if derived[0] in frame else None
        suite = infer_suite(summaries, labels, raw.rows, spec, table=raw.is_table)
    result = run_on_frame(frame, suite)
    samples = {row: dict(frame.loc[row]) for row in _failing(result)}
    found = source_profile(raw, frame, spec.target, task)
    columns = [str(name) for name in frame]
    warnings = None
    if dataset is not None and not raw.is_table:
        warnings, problem = _made(lambda: sample_warnings(dataset))
    schema = dataset.schema if dataset is not None else None
    rows = raw.rows
    return Checked(suite, result, columns, samples, rows, found, warnings or [], schema, problem)


def _validation(checked: Checked, spec: DataSpec, source: SuiteSource) -> Validation:
    met = bool(checked.result["success"])
    expectations = [
        _expectation(entry, checked, spec.target) for entry in checked.result["results"]
    ]
    if checked.problem is not None:
        usable = Expectation(expectation=USABLE, success=False, observed=checked.problem)
        expectations.append(usable)
    return Validation(
        success=met and checked.schema is not None,
        suite_source=source,
        suite=checked.suite,
        expectations=expectations,
        data=checked.schema,
        checked_rows=checked.rows,
        great_expectations=checked.result,
        profile=checked.profile,
        warnings=checked.warnings,
    )


def _failing(result: dict[str, Any]) -> set[int]:
    """The numbers of the rows to show."""
    return {row for entry in result["results"] for row in _rows(entry)}


def _rows(entry: dict[str, Any]) -> list[int]:
    rows = entry["result"].get("partial_unexpected_index_list") or []
    return [] if entry["success"] else rows[:SAMPLE_ROWS]


def _expectation(entry: dict[str, Any], checked: Checked, target: str) -> Expectation:
    config, result = entry["expectation_config"], entry["result"]
    kwargs = {
        name: value
        for name, value in config["kwargs"].items()
        if name not in ("batch_id", "column")
    }
    column = config["kwargs"].get("column")
    observed = result.get("observed_value", entry["exception_info"]["exception_message"])
    if observed is None and result.get("partial_unexpected_counts"):
        values = [part["value"] for part in result["partial_unexpected_counts"][:SAMPLE_ROWS]]
        observed = [one for one in values if one is not None] or None  # None: no value
    first = [name for name in (column, target) if name in checked.columns]
    names = list(dict.fromkeys([*first, *checked.columns]))[:SAMPLE_COLUMNS]
    return Expectation(
        expectation=config["type"],
        column=column,
        expected=kwargs,
        success=entry["success"],
        observed=observed,
        unexpected_count=result.get("unexpected_count"),
        sample_rows=[
            {"index": row} | {name: plain(checked.samples[row][name]) for name in names}
            for row in _rows(entry)
        ],
    )


def main(request_file: str, response_file: str) -> None:
    """Answer one request."""
    request = json.loads(Path(request_file).read_text())
    try:
        spec = DataSpec.model_validate(request["data"])
        answer = check(spec, request["seed"], request["suite_source"], request["suite"]).model_dump(
            mode="json"
        )
    except TrainwrightError as error:
        answer = {"error": error.document()}
    Path(response_file).write_text(json.dumps(_finite(answer), allow_nan=False))


def _finite(value: Any) -> Any:
    """The same, with numbers that are not finite as text: a standard deviation can overflow."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value


if __name__ == "__main__":
    main(*sys.argv[1:])
