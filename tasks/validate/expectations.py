"""The process that imports Great Expectations.

Usage: `python -m trainwright.tasks.validate.expectations REQUEST RESPONSE`.

`tasks.validate.check` starts it, because the import takes seconds and hundreds of megabytes. Both
arguments are JSON files. The request has `data` (a DataSpec), `seed`, `suite_source` and `suite`.
The response is a Validation, or `{"error": …}` if the data can't be read or the suite is
invalid.
"""

# ruff: noqa: TID253 -- only runs in a separate process

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from trainwright.tasks.data.dataset import from_raw
from trainwright.tasks.data.sources import read
from trainwright.tasks.data.stored_rows import task_of
from trainwright.tasks.errors import BadInput, TrainwrightError
from trainwright.tasks.runs.artefacts import Expectation, Validation
from trainwright.tasks.spec.job import DataSpec
from trainwright.tasks.validate.drift.source_profile import source_profile
from trainwright.tasks.validate.suite import Config, infer_suite, make_frame

SuiteSource = Literal["given", "kept", "inferred"]

SAMPLE_ROWS = 5
SAMPLE_COLUMNS = 12
USABLE = "data_to_be_usable_for_training"
"""Our own expectation: `tasks.data` can make arrays of the data."""


def check(spec: DataSpec, seed: int, source: SuiteSource, suite: list[Config]) -> Validation:
    """Read the data and check it with the suite, or with an inferred one. Raises BadInput."""
    raw = read(spec)
    known = raw.targets is not None or spec.target in raw.table.column_names
    if not known and raw.rows and source == "inferred":
        from_raw(raw, spec, seed)  # raises BadInput with the columns' names
    task = task_of(raw, spec) if known else spec.task or "custom"
    frame = make_frame(raw, spec.target, task, seed=seed, sampled=source != "given")
    if source == "given":
        frame = frame.drop(
            columns=[
                name
                for name in frame.columns
                if raw.is_table and name not in raw.table.column_names
            ]
        )
    elif source == "inferred":
        suite = infer_suite(frame, raw.rows, spec, task, table=raw.is_table)
    result = run(frame, raw.rows, suite)
    expectations = [_expectation(entry, frame, spec.target) for entry in result["results"]]
    schema, problem = None, None
    try:
        schema = from_raw(raw, spec, seed).schema
    except BadInput as error:
        problem = str(error)
    if problem is not None and result["success"]:
        expectations.append(Expectation(expectation=USABLE, success=False, observed=problem))
    return Validation(
        success=bool(result["success"]) and schema is not None,
        suite_source=source,
        suite=suite,
        expectations=expectations,
        data=schema,
        checked_rows=len(frame),
        great_expectations=result,
        profile=source_profile(raw, frame, spec.target, task),
    )


def run(frame: pd.DataFrame, rows: int, suite: list[Config]) -> dict[str, Any]:
    """Great Expectations' result as JSON values.

    If the frame is a sample, expectations on the row count run on an empty frame with all rows.
    """
    parts = [(frame, suite)]
    if len(frame) != rows:
        counting = [
            config for config in suite if config["type"].startswith("expect_table_row_count")
        ]
        parts = [
            (pd.DataFrame(index=pd.RangeIndex(rows)), counting),
            (frame, [config for config in suite if config not in counting]),
        ]
    results = [_run(part, configs) for part, configs in parts if configs]
    whole = results[-1]
    whole["success"] = all(result["success"] for result in results)
    whole["results"] = [entry for result in results for entry in result["results"]]
    met = sum(entry["success"] for entry in whole["results"])
    whole["statistics"] = {
        "evaluated_expectations": len(whole["results"]),
        "successful_expectations": met,
        "unsuccessful_expectations": len(whole["results"]) - met,
        "success_percent": 100 * met / len(whole["results"]),
    }
    return whole


def _run(frame: pd.DataFrame, suite: list[Config]) -> dict[str, Any]:
    import great_expectations as gx

    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = {"globally": False}
    asset = context.data_sources.add_pandas("data").add_dataframe_asset("data")
    batch = asset.add_batch_definition_whole_dataframe("all").get_batch(
        batch_parameters={"dataframe": frame}
    )
    expected = gx.ExpectationSuite(name="suite", expectations=[_known(config) for config in suite])
    # A ValidationDefinition would store the result first, and that fails on some expectations'
    # numpy bools.
    result = batch.validate(expected, result_format="SUMMARY")
    document: dict[str, Any] = plain(result.to_json_dict())
    for entry in document["results"]:
        # Keep the message only: a traceback contains paths of this machine.
        entry["exception_info"] = {
            "raised_exception": bool(_raised(entry)),
            "exception_message": _raised(entry),
        }
    order = [_identity(config) for config in suite]
    document["results"].sort(key=lambda entry: _place(entry, order))
    return document


def _known(config: Config) -> Any:
    """The configuration as Great Expectations' object. Raises BadInput if it can't be used."""
    from great_expectations.expectations.expectation_configuration import ExpectationConfiguration

    made = ExpectationConfiguration(**config)
    try:
        made.to_domain_obj()
    except Exception as error:
        reason = str(error).splitlines()[-1] if str(error) else type(error).__name__
        raise BadInput(
            f"data.expectations: {config['type']} {config['kwargs']} can't be used: {reason}"
        ) from error
    return made


def _identity(config: Config) -> list[Any]:
    return [config["type"], config["kwargs"].get("column")]


def _place(entry: dict[str, Any], order: list[list[Any]]) -> int:
    """A result's position in the suite: Great Expectations returns results in another order."""
    found = _identity(entry["expectation_config"])
    return order.index(found) if found in order else len(order)


def _raised(entry: dict[str, Any]) -> str | None:
    """The message of the error that evaluating an expectation raised, if any.

    It is in the entry itself, or in an entry for each metric that was needed.
    """
    info = entry["exception_info"]
    problems = (
        [info]
        if "exception_message" in info
        else [value for value in info.values() if isinstance(value, dict)]
    )
    messages = [problem.get("exception_message") for problem in problems]
    return next((" ".join(str(message).split()) for message in messages if message), None)


def _expectation(entry: dict[str, Any], frame: pd.DataFrame, target: str) -> Expectation:
    config, result = entry["expectation_config"], entry["result"]
    kwargs = {
        name: value
        for name, value in config["kwargs"].items()
        if name not in ("batch_id", "column")
    }
    column = config["kwargs"].get("column")
    observed = result.get("observed_value", entry["exception_info"]["exception_message"])
    if observed is None and result.get("partial_unexpected_counts"):
        observed = [part["value"] for part in result["partial_unexpected_counts"][:SAMPLE_ROWS]]
    rows = (
        []
        if entry["success"]
        else (result.get("partial_unexpected_index_list") or [])[:SAMPLE_ROWS]
    )
    return Expectation(
        expectation=config["type"],
        column=column,
        expected=kwargs,
        success=entry["success"],
        observed=observed,
        unexpected_count=result.get("unexpected_count"),
        sample_rows=[_row(frame, row, column, target) for row in rows],
    )


def _row(frame: pd.DataFrame, row: int, column: str | None, target: str) -> dict[str, Any]:
    """A row with its number: the failing column, the target, and the first other columns."""
    first = [name for name in (column, target) if name in frame.columns]
    names = list(dict.fromkeys([*first, *frame.columns]))[:SAMPLE_COLUMNS]
    values: dict[str, Any] = plain(dict(zip(names, frame.loc[row, names], strict=True)))
    return {"index": int(row), **values}


def plain(value: Any) -> Any:
    """The value in JSON's types: NumPy's numbers as Python's, infinite as text, missing as None."""
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(entry) for entry in value]
    if hasattr(value, "item"):
        value = value.item()
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None if math.isnan(value) else str(value)
    return None if value is pd.NaT or value is pd.NA else str(value)


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
