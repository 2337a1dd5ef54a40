"""Tables in DuckDB: their values, their rows' numbers, and what Great Expectations says of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from great_expectations.execution_engine import SqlAlchemyExecutionEngine
from great_expectations.expectations.registry import list_registered_expectation_implementations
from pyarrow import parquet

from trainwright.tasks.errors import BadInput, TrainwrightError
from trainwright.tasks.runs.artefacts.validation import Validation
from trainwright.tasks.spec.data_spec import DataSpec
from trainwright.tasks.validate.check import failure_line, validate
from trainwright.tasks.validate.duckdb_table import DuckDBDatabase, DuckDBTable, can_hold
from trainwright.tasks.validate.gx_run import keep_one_connection, run_on_frame, run_on_table

ROWS = 200
Open = Callable[..., DuckDBTable]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Opens tables, each written as one file."""
    tables: list[DuckDBTable] = []

    def open_tables(*parts: pa.Table, target: str = "label") -> DuckDBTable:
        folder = tmp_path / str(len(tables))
        folder.mkdir()
        files = [folder / f"*[{number}].parquet" for number in range(len(parts))]
        for file, part in zip(files, parts, strict=True):
            parquet.write_table(part, file)
        table = DuckDBTable(files, folder)
        table.add_labels(target, classes=target in table.kinds)
        tables.append(table)
        return table

    yield open_tables
    for table in tables:
        table.close()


def mixed() -> pa.Table:
    random = np.random.default_rng(0)
    days = np.datetime64("2024-01-01") + np.arange(ROWS).astype("m8[D]")
    return pa.table(
        {
            "a": np.arange(ROWS) + 0.5,
            "b": random.integers(0, 5, ROWS),
            "c": random.integers(0, 5, ROWS),
            "colour": np.array(["red", "blue", "green"])[random.integers(0, 3, ROWS)],
            "n": pa.array(random.normal(size=ROWS), mask=random.random(ROWS) < 0.1),
            "flag": random.random(ROWS) < 0.5,
            "day": pa.array(days.astype("M8[us]")),
            "json": ['{"x": 1}'] * ROWS,
            "when": ["2024-01-02"] * ROWS,
        }
    )


def one(kind: str, **kwargs: Any) -> dict[str, Any]:
    return {"type": f"expect_{kind}", "kwargs": kwargs}


WEIGHTS = {"values": ["red", "blue", "green"], "weights": [0.3, 0.3, 0.4]}
QUANTILES = {"quantiles": [0.25, 0.5], "value_ranges": [[0, 10], [None, 50]]}
SUITE = [
    one("table_row_count_to_be_between", min_value=1, max_value=1000),
    one("table_row_count_to_equal", value=ROWS),
    one("table_column_count_to_equal", value=9),
    one("table_columns_to_match_ordered_list", column_list=mixed().column_names),
    one("table_columns_to_match_set", column_set=mixed().column_names),
    one("column_to_exist", column="a"),
    one("column_values_to_not_be_null", column="n"),
    one("column_values_to_be_null", column="n"),
    one("column_values_to_be_between", column="a", min_value=3, max_value=100),
    one("column_values_to_be_in_set", column="colour", value_set=["red", "blue"]),
    one("column_values_to_be_in_set", column="colour", value_set=[1, 2]),
    one("column_values_to_be_in_set", column="b", value_set=["1", "2"]),
    one("column_values_to_be_in_set", column="flag", value_set=[True]),
    one("column_values_to_not_be_in_set", column="b", value_set=[1]),
    one("column_values_to_be_unique", column="b"),
    one("column_values_to_be_increasing", column="b"),
    one("column_values_to_be_of_type", column="a", type_="float64"),
    one("column_values_to_be_in_type_list", column="a", type_list=["float64"]),
    one("column_value_lengths_to_be_between", column="colour", min_value=4, max_value=9),
    one("column_value_lengths_to_equal", column="colour", value=4),
    one("column_values_to_match_regex", column="colour", regex="^[rb]"),
    one("column_values_to_not_match_regex_list", column="colour", regex_list=["^[rb]"]),
    one("column_values_to_match_strftime_format", column="when", strftime_format="%Y-%m-%d"),
    one("column_values_to_be_json_parseable", column="json"),
    one("column_values_to_match_json_schema", column="json", json_schema={"type": "object"}),
    one("column_distinct_values_to_contain_set", column="colour", value_set=["red", "x"]),
    one("column_max_to_be_between", column="a", max_value=10),
    one("column_min_to_be_between", column="a", min_value=10),
    one("column_mean_to_be_between", column="b", max_value=1),
    one("column_mean_to_be_between", column="flag", max_value=0.1),
    one("column_median_to_be_between", column="a", max_value=10),
    one("column_sum_to_be_between", column="a", max_value=10),
    one("column_stdev_to_be_between", column="a", max_value=10),
    one("column_most_common_value_to_be_in_set", column="colour", value_set=["x"]),
    one("column_proportion_of_unique_values_to_be_between", column="b", min_value=0.5),
    one("column_proportion_of_non_null_values_to_be_between", column="n", min_value=0.95),
    one("column_unique_value_count_to_be_between", column="b", min_value=50),
    one("column_value_z_scores_to_be_less_than", column="n", threshold=1, double_sided=True),
    one("column_values_to_not_be_outliers", column="n", method="iqr", multiplier=0.5),
    one("column_kl_divergence_to_be_less_than", column="colour", partition_object=WEIGHTS,
        threshold=0.1),
    one("column_pair_values_a_to_be_greater_than_b", column_A="a", column_B="b"),
    one("column_pair_values_to_be_equal", column_A="c", column_B="b"),
    one("column_pair_values_to_be_in_set", column_A="c", column_B="b", value_pairs_set=[[1, 2]]),
    one("compound_columns_to_be_unique", column_list=["b", "c"]),
    one("multicolumn_sum_to_equal", column_list=["b", "c"], sum_total=5),
    one("multicolumn_values_to_be_equal", column_list=["b", "c"]),
    one("select_column_values_to_be_unique_within_record", column_list=["b", "c"]),
    one("column_values_to_be_between", column="weight", min_value=3),
    one("column_values_to_be_between", column="a", min_value=3, max_value=100,
        row_condition="b==1", condition_parser="pandas"),
]  # fmt: skip


def told(entry: dict[str, Any]) -> tuple[Any, ...]:
    found = entry["result"]
    observed = found.get("observed_value")
    if isinstance(observed, float):
        observed = pytest.approx(observed)
    return (
        entry["success"],
        observed,
        found.get("unexpected_count"),
        (found.get("partial_unexpected_index_list") or [])[:5],
        found.get("partial_unexpected_list"),
        entry["exception_info"]["exception_message"],
    )


def test_every_expectation_says_the_same_over_duckdb_as_with_pandas(opened: Open) -> None:
    table = opened(mixed())
    known = set(list_registered_expectation_implementations())  # fewer in the oldest version
    suite = [config for config in SUITE if config["type"] in known]
    assert len(suite) >= len(SUITE) - 3
    exact = run_on_table(table, suite, derived=False)["results"]
    pandas = run_on_frame(mixed().to_pandas(), suite)["results"]
    assert [entry["expectation_config"]["type"] for entry in exact] == [
        config["type"] for config in suite
    ]
    for one_exact, one_pandas in zip(exact, pandas, strict=True):
        assert told(one_exact) == told(one_pandas), one_exact["expectation_config"]
    ((quantiles,),) = (
        run_on_table(
            table,
            [one("column_quantile_values_to_be_between", column="a", quantile_ranges=QUANTILES)],
            derived=False,
        )["results"],
    )
    assert quantiles["result"]["observed_value"]["values"] == [49.5, 99.5]


def test_names_that_mean_something_in_sql_are_only_names(opened: Open) -> None:
    names = ['a"b', "x%y", "a:b", "a.b", "`", "select", "[x]", "a\\b", "q'q", "%(x)s", "?", "$1"]
    table = opened(pa.table({name: np.arange(50) + at for at, name in enumerate(names)}))
    suite = [one("column_values_to_be_between", column=name, max_value=40) for name in names]
    found = run_on_table(table, suite, derived=False)["results"]
    assert [entry["result"]["unexpected_count"] for entry in found] == [
        9 + at for at in range(len(names))
    ]


def test_rows_of_several_files_are_numbered_through_and_have_their_values(opened: Open) -> None:
    parts = [
        pa.table({"x": np.arange(first, first + 100), "label": ["a", "b"] * 50})
        for first in (0, 100, 200)
    ]
    table = opened(*parts)
    suite = [one("column_values_to_be_between", column="x", max_value=249)]
    (entry,) = run_on_table(table, suite, derived=True)["results"]
    assert entry["result"]["partial_unexpected_index_list"][:2] == [250, 251]
    assert table.rows == 300
    assert table.sample([250, 7], ["x", "label", "rows with this label"]) == {
        7: {"x": 7, "label": "b", "rows with this label": 150},
        250: {"x": 250, "label": "a", "rows with this label": 150},
    }


def test_a_table_has_the_values_that_pandas_sees(opened: Open) -> None:
    moment = datetime(2024, 1, 2)
    given = pa.table(
        {
            "float": pa.array([1.5, float("nan"), None], pa.float32()),
            "decimal": pa.array([1, 2, None]).cast(pa.decimal128(30, 2)),
            "text": pa.array(["a", "b", "a"]).dictionary_encode(),
            "flag": [True, None, False],
            "moment": [moment, None, moment],
        }
    )
    table = opened(given, target="none")
    assert table.kinds == {
        "float": "number",
        "decimal": "number",
        "text": "text",
        "flag": "flag",
        "moment": "other",
    }
    assert table.frame(["float", "decimal"]).to_dict("list")["float"][0] == 1.5
    assert table.query("SELECT count(float), sum(decimal), count(moment) FROM plain") == [
        (1, 3.0, 2)
    ]
    summaries = {one.name: one for one in table.summaries()}
    assert (summaries["float"].finite, summaries["float"].mean) == (1, 1.5)
    assert summaries["text"].values == ["a", "b"]


def test_the_first_of_one_error_does_not_spoil_the_queries_after_it(opened: Open) -> None:
    table = opened(mixed())
    suite = [
        one("column_mean_to_be_between", column="colour", max_value=1),
        one("column_mean_to_be_between", column="a", max_value=1),
    ]
    first, second = run_on_table(table, suite, derived=False)["results"]
    assert first["exception_info"]["raised_exception"]
    assert second["result"]["observed_value"] == 100.0


def test_a_file_that_is_cut_short_is_refused_in_one_line(tmp_path: Path, opened: Open) -> None:
    parquet.write_table(mixed(), tmp_path / "whole.parquet")
    content = (tmp_path / "whole.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(b"PAR1" + bytes(500) + content[-1200:])
    with pytest.raises(BadInput, match=r"data\.uri: it can't be checked") as caught:
        DuckDBTable([tmp_path / "cut.parquet"], tmp_path).summaries()
    assert "\n" not in str(caught.value)


def test_too_little_memory_is_said_in_one_line(tmp_path: Path) -> None:
    found = DuckDBDatabase(tmp_path).as_error(
        duckdb.OutOfMemoryException("Out of Memory Error:\n 3 GiB")
    )
    assert str(found) == (
        "validate: 400MB of memory and the disk don't suffice: Out of Memory Error: 3 GiB"
    )
    assert not isinstance(found, BadInput)


def test_another_way_of_opening_connections_is_refused_clearly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def execute_query(self: Any, query: Any) -> Any:
        return self.engine.connect().execute(query)

    monkeypatch.setattr(SqlAlchemyExecutionEngine, "execute_query", execute_query)
    with pytest.raises(TrainwrightError, match="opens connections in another way; install the"):
        keep_one_connection()


def checked(folder: Path, given: pa.Table) -> Validation:
    parquet.write_table(given, folder / "data.parquet")
    return validate(DataSpec(uri=str(folder / "data.parquet")))


def test_columns_that_differ_in_case_only_are_checked_without_duckdb(tmp_path: Path) -> None:
    given = pa.table({"a": range(40), "A": [None, *range(39)], "label": ["x", "y"] * 20})
    parquet.write_table(given, tmp_path / "twins.parquet")
    assert not can_hold([tmp_path / "twins.parquet"], "label")
    found = checked(tmp_path, given)
    assert not found.success
    assert "column 'A': 1 of 40 values are missing" in failure_line(found)
