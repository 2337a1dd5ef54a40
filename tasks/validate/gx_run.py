"""Runs a suite with Great Expectations: on a table in DuckDB, or on a frame with pandas.

Great Expectations has no engine for DuckDB. Its engine for databases works over `duckdb_engine` if
it keeps one connection, as it does for SQLite; `keep_one_connection` makes it do so. What it can't
do over DuckDB (regular expressions, types, …) runs with pandas on the columns concerned.
"""

# ruff: noqa: TID253 -- only loaded by tasks.validate.expectations, in a separate process

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterator
from typing import Any

import great_expectations as gx
import pandas as pd
from great_expectations.execution_engine import SqlAlchemyExecutionEngine
from great_expectations.expectations.expectation_configuration import ExpectationConfiguration

from trainwright.tasks.errors import BadInput, TrainwrightError
from trainwright.tasks.validate.column_summary import ValueKind
from trainwright.tasks.validate.duckdb_table import ROW, DuckDBTable
from trainwright.tasks.validate.suite import Config

_PLACE = "trainwright_place"
_IN_DUCKDB = frozenset(
    f"expect_{name}"
    for name in (
        "table_row_count_to_be_between",
        "table_row_count_to_equal",
        "table_column_count_to_be_between",
        "table_column_count_to_equal",
        "table_columns_to_match_ordered_list",
        "table_columns_to_match_set",
        "column_to_exist",
        "column_values_to_be_null",
        "column_values_to_not_be_null",
        "column_values_to_be_between",
        "column_values_to_be_in_set",
        "column_values_to_not_be_in_set",
        "column_values_to_be_unique",
        "column_value_lengths_to_be_between",
        "column_value_lengths_to_equal",
        "column_value_z_scores_to_be_less_than",
        "column_distinct_values_to_be_in_set",
        "column_distinct_values_to_contain_set",
        "column_distinct_values_to_equal_set",
        "column_kl_divergence_to_be_less_than",
        "column_max_to_be_between",
        "column_mean_to_be_between",
        "column_median_to_be_between",
        "column_min_to_be_between",
        "column_most_common_value_to_be_in_set",
        "column_proportion_of_non_null_values_to_be_between",
        "column_proportion_of_unique_values_to_be_between",
        "column_quantile_values_to_be_between",
        "column_stdev_to_be_between",
        "column_sum_to_be_between",
        "column_unique_value_count_to_be_between",
        "column_pair_values_a_to_be_greater_than_b",
        "column_pair_values_to_be_equal",
        "column_pair_values_to_be_in_set",
        "multicolumn_sum_to_equal",
        "multicolumn_values_to_be_equal",
        "select_column_values_to_be_unique_within_record",
    )
)
"""The expectations that give the same over DuckDB as with pandas, with the rows' numbers."""

_TEXTS = "texts, which this expectation can't compare"
"""what is said of a column of texts, instead of the errors of pandas, which name its methods"""

_WITH_ROWS = ("numbered", "labelled")

GXResult = dict[str, Any]
PlacedConfig = tuple[int, Config]


def run_on_frame(frame: pd.DataFrame, suite: list[Config]) -> GXResult:
    """Great Expectations' result as JSON values, with the entries in the suite's order."""
    return _whole([_validated(_frame_batch(frame), list(enumerate(suite)), {})])


def run_on_table(table: DuckDBTable, suite: list[Config], *, derived: bool) -> GXResult:
    """The same for a table, exactly. `derived`: the suite knows the columns of the label's rows."""
    keep_one_connection()
    source = _context().data_sources.add_sql(
        "data",
        connection_string=str(table.engine.url),
        kwargs={"connect_args": table.connect_args},
    )
    known = set(table.kinds) | (set(table.derived) if derived else set())
    views: dict[str, list[PlacedConfig]] = {}
    with_pandas: list[PlacedConfig] = []
    for place, config in enumerate(suite):
        if _runs_in_duckdb(config, table.kinds):
            views.setdefault(_view(config, table, derived), []).append((place, config))
        else:
            with_pandas.append((place, config))
    documents = []
    for view, placed in views.items():
        batch = (
            source.add_table_asset(view, table_name=view)
            .add_batch_definition_whole_table("all")
            .get_batch()
        )
        numbers = {"unexpected_index_column_names": [ROW]} if view in _WITH_ROWS else {}
        document = _validated(batch, placed, numbers)
        # What DuckDB can't compare, such as texts with numbers, pandas may.
        again = {
            place
            for place, config in placed
            if _raised(document["results"][place]) and set(_columns(config)) <= known
        }
        for place in again:
            del document["results"][place]
        with_pandas += [one for one in placed if one[0] in again]
        documents.append(document)
    found = _whole([*documents, *_on_columns(table, sorted(with_pandas), known)])
    for config, entry in zip(suite, found["results"], strict=True):
        if _raised(entry) and any(table.kinds.get(name) == "text" for name in _columns(config)):
            entry["exception_info"]["exception_message"] = _TEXTS
    return found


def _on_columns(
    table: DuckDBTable, placed: list[PlacedConfig], known: set[str]
) -> Iterator[GXResult]:
    """Results with pandas, on a frame with only the columns that an expectation names."""
    by_columns: dict[tuple[str, ...], list[PlacedConfig]] = {}
    for place, config in placed:
        columns = set(_columns(config)) & known
        if config["kwargs"].get("row_condition") is not None:
            columns = known
        by_columns.setdefault(tuple(sorted(columns)), []).append((place, config))
    for names, entries in by_columns.items():
        frame = table.frame([name for name in (*table.kinds, *table.derived) if name in names])
        yield _validated(_frame_batch(frame), entries, {})


def keep_one_connection() -> None:
    """Make the engine for databases keep its connection, because DuckDB's results end with it.

    Raises TrainwrightError if this version of Great Expectations is built differently.
    """
    engine = SqlAlchemyExecutionEngine
    made = inspect.unwrap(engine.__init__).__code__.co_names
    run = inspect.unwrap(engine.execute_query).__code__.co_names
    if "_connection" not in made or "get_connection" not in run:
        raise TrainwrightError(
            f"validate: Great Expectations {gx.__version__} opens connections in another way; "
            "install the version that infra/requirements.lock names"
        )

    @contextlib.contextmanager
    def get_connection(self: Any) -> Iterator[Any]:
        if self._connection is None:
            self._connection = self.engine.connect()
        try:
            yield self._connection
        except Exception:
            self._connection.rollback()  # else every later query fails
            raise

    engine.get_connection = get_connection


def _context() -> Any:
    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = {"globally": False}
    return context


def _frame_batch(frame: pd.DataFrame) -> Any:
    asset = _context().data_sources.add_pandas("data").add_dataframe_asset("data")
    return asset.add_batch_definition_whole_dataframe("all").get_batch(
        batch_parameters={"dataframe": frame}
    )


def _validated(batch: Any, placed: list[PlacedConfig], numbers: GXResult) -> GXResult:
    """Great Expectations' document, with `results` by the place in the suite."""
    expected = gx.ExpectationSuite(
        name="suite", expectations=[_known(config, place) for place, config in placed]
    )
    # A ValidationDefinition would store the result first, and that fails on some expectations'
    # numpy bools.
    result = batch.validate(expected, result_format={"result_format": "SUMMARY", **numbers})
    document: GXResult = plain(result.to_json_dict())
    entries = {}
    for entry in document["results"]:
        place = entry["expectation_config"]["meta"].pop(_PLACE)
        # Keep the message only: a traceback contains paths of this machine.
        message = _message(entry["exception_info"])
        entry["exception_info"] = {
            "raised_exception": message is not None,
            "exception_message": message,
        }
        found = entry["result"]
        for name in ("unexpected_index_query", "unexpected_index_column_names"):
            found.pop(name, None)
        if (rows := found.get("partial_unexpected_index_list")) is not None:
            found["partial_unexpected_index_list"] = [
                row[ROW] if isinstance(row, dict) else row for row in rows
            ]
        entries[place] = entry
    document["results"] = entries
    return document


def _whole(documents: list[GXResult]) -> GXResult:
    """One document with all results in the suite's order."""
    entries = {place: entry for one in documents for place, entry in one["results"].items()}
    results = [entries[place] for place in sorted(entries)]
    met = sum(entry["success"] for entry in results)
    return documents[-1] | {
        "success": met == len(results),
        "results": results,
        "statistics": {
            "evaluated_expectations": len(results),
            "successful_expectations": met,
            "unsuccessful_expectations": len(results) - met,
            "success_percent": 100 * met / len(results),
        },
    }


def _known(config: Config, place: int) -> Any:
    """The configuration as Great Expectations' object. Raises BadInput if it can't be used."""
    marked = {**config, "meta": {**(config.get("meta") or {}), _PLACE: place}}
    made = ExpectationConfiguration(**marked)
    try:
        made.to_domain_obj()
    except Exception as error:
        reason = str(error).splitlines()[-1] if str(error) else type(error).__name__
        raise BadInput(
            f"data.expectations: {config['type']} {config['kwargs']} can't be used: {reason}"
        ) from error
    return made


def _runs_in_duckdb(config: Config, kinds: dict[str, ValueKind]) -> bool:
    """Whether DuckDB gives the same result as pandas: it compares texts with numbers."""
    kwargs = config["kwargs"]
    if config["type"] not in _IN_DUCKDB or kwargs.get("row_condition") is not None:
        return False
    compared = [kwargs.get(name) for name in ("min_value", "max_value")]
    for value in kwargs.get("value_set") or ():
        compared += value if isinstance(value, list | tuple) else [value]
    for name in _columns(config):
        kind = kinds.get(name, "number")
        if any(not _comparable(kind, value) for value in compared if value is not None):
            return False
    return True


def _comparable(kind: ValueKind, value: Any) -> bool:
    if kind == "number":
        return isinstance(value, int | float)
    if kind == "flag":
        return isinstance(value, bool)
    return kind == "other" or isinstance(value, str)


def _view(config: Config, table: DuckDBTable, derived: bool) -> str:
    if config["type"].startswith("expect_table_") or config["type"] == "expect_column_to_exist":
        return "checked" if derived else "plain"
    return "labelled" if derived and set(_columns(config)) & set(table.derived) else "numbered"


def _columns(config: Config) -> list[str]:
    kwargs = config["kwargs"]
    named = [kwargs.get(name) for name in ("column", "column_A", "column_B")]
    return [name for name in named if name is not None] + list(kwargs.get("column_list") or ())


def _raised(entry: GXResult) -> bool:
    """Whether evaluating an expectation raised an error, or gave nothing."""
    return bool(entry["exception_info"]["raised_exception"] or not entry["result"])


def _message(info: dict[str, Any]) -> str | None:
    """The message of the error that evaluating an expectation raised, if any.

    It is in the information itself, or in that on each metric that was needed.
    """
    problems = (
        [info]
        if "exception_message" in info
        else [value for value in info.values() if isinstance(value, dict)]
    )
    messages = [problem.get("exception_message") for problem in problems]
    return next((" ".join(str(message).split()) for message in messages if message), None)


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
