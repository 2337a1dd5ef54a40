"""Rows become the arrays that training made of the same rows, or one clear line."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from trainwright.tasks.data.modalities.tokens import tokens
from trainwright.tasks.errors import BadInput
from trainwright.tasks.inference.model_input import ModelInput, from_offsets, require_columns
from trainwright.tasks.runs.artefacts.data_schema import Column, DataSchema


def schema(
    columns: list[Column], inputs: dict[str, tuple[int, ...]], dtypes: dict[str, str]
) -> DataSchema:
    return DataSchema(
        task="tabular-classification",
        rows=10,
        train_rows=8,
        validation_rows=2,
        inputs=inputs,
        input_dtypes=dtypes,
        target="label",
        target_dtype="int64",
        classes=["a", "b"],
        columns=columns,
        sha256="0",
    )


MIXED = schema(
    [
        Column(name="x", kind="number"),
        Column(name="colour", kind="category", vocabulary=3),
        Column(name="y", kind="number"),
    ],
    {"numbers": (2,), "categories": (1,)},
    {"numbers": "float32", "categories": "int64"},
)
TEXT = schema([Column(name="said", kind="text")], {"inputs": (4,)}, {"inputs": "int64"})


def batch(**columns: Any) -> Any:
    return pa.RecordBatch.from_pydict(columns)


def test_numbers_and_categories_have_the_order_and_codes_of_the_run() -> None:
    made = ModelInput(MIXED, {"colour": ["blue", "red"]}, True, "rows.csv")
    rows = batch(
        colour=pa.array(["red", "mauve", None], pa.dictionary(pa.int8(), pa.string())),
        y=[True, False, None],
        x=pa.array([None, 1, 2], pa.decimal128(5, 2)),
    )
    found = made.arrays(rows)
    assert found["categories"].tolist() == [[2], [0], [0]]
    assert found["categories"].dtype == np.int64
    np.testing.assert_array_equal(found["numbers"], [[np.nan, 1], [1, 0], [2, np.nan]])
    assert found["numbers"].dtype == np.float32


def test_columns_that_hold_nothing_are_missing_values() -> None:
    made = ModelInput(MIXED, {"colour": ["blue"]}, True, "rows.csv")
    found = made.arrays(batch(x=pa.nulls(1), y=[1.0], colour=pa.nulls(1)))
    assert np.isnan(found["numbers"][0, 0])
    assert found["categories"].tolist() == [[0]]


def test_texts_become_tokens_as_in_training() -> None:
    made = ModelInput(TEXT, {}, True, "rows.csv")
    texts = ["Hello, world", "one two three four five", None]
    found = made.arrays(batch(said=texts))["inputs"]
    assert found.dtype == np.int64
    wanted = [(tokens(text or "") + [0] * 4)[:4] for text in texts]
    assert found.tolist() == wanted


def test_a_missing_text_is_refused_if_training_had_none() -> None:
    made = ModelInput(TEXT, {}, False, "rows.csv")
    made.arrays(batch(said=["a", "b"]))
    with pytest.raises(BadInput, match=r"'said' has no value in row 3 \(from 0\)"):
        made.arrays(batch(said=["c", None]))


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (pa.timestamp("s"), "the column 'x' holds time stamps"),
        (pa.list_(pa.float32()), "the column 'x' holds lists"),
        (pa.string(), "the run's model takes numbers"),
    ],
)
def test_other_types_are_refused(kind: Any, says: str) -> None:
    given = pa.schema([("x", kind), ("y", pa.int8()), ("colour", pa.string())])
    with pytest.raises(BadInput, match=says):
        require_columns(MIXED.columns, given, "rows.csv")


def test_numbers_for_texts_are_refused_and_other_columns_are_named() -> None:
    given = pa.schema([("x", pa.int8()), ("y", pa.bool_()), ("colour", pa.int8())])
    with pytest.raises(BadInput, match="'colour' holds whole numbers; the run's model takes texts"):
        require_columns(MIXED.columns, given, "rows.csv")
    fits = given.set(2, pa.field("colour", pa.large_string())).append(pa.field("z", pa.null()))
    assert require_columns(MIXED.columns, fits, "rows.csv") == ["z"]


def test_a_missing_column_is_named_beside_the_dates_of_the_table_not_their_parts() -> None:
    names = ["sold year", "sold month", "age"]
    columns = [Column(name=name, kind="number") for name in names]
    given = pa.schema([(name, pa.int64()) for name in names[:2]])
    with pytest.raises(BadInput) as raised:
        require_columns(columns, given, "x.csv", {"sold": names[:2]})
    assert str(raised.value) == ("rows: x.csv has no column 'age'; the run's model takes sold, age")


def test_distances_from_an_offset_are_exact_for_any_type_of_numbers() -> None:
    """As training stores them, and as a source's own predict gets them."""
    for given, kind in (
        (2**60, pa.int64()), (2**63 + 2**62, pa.uint64()), (2**50, pa.float64()),
        (2**50, pa.decimal128(20, 0)),
    ):  # fmt: skip
        column = Column(name="x", kind="number", missing=1, offset=given)
        numbers = schema([column], {"inputs": (1,)}, {"inputs": "float32"})
        rows = batch(x=pa.array([given - 1, None, given + 3], kind))
        found = ModelInput(numbers, {}, True, "rows.csv").arrays(rows)["inputs"][:, 0]
        assert np.array_equal(found, np.float32([-1, np.nan, 3]), equal_nan=True)
        raw = from_offsets(rows, [column]).column("x").to_numpy(zero_copy_only=False)
        assert np.array_equal(raw, found, equal_nan=True)
