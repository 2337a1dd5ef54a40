"""Row conditions compare columns with values; nothing in them can run code."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.tasks.errors import BadInput
from trainwright.tasks.validate.check import read_suite
from trainwright.tasks.validate.row_condition import is_plain_condition

FRAME = pd.DataFrame(
    {"age": [1.0, None, 7.0], "a town": ["Rome", "Oslo", "it's"], "pay (EUR)": [1, 2, 3]}
)


@pytest.mark.parametrize(
    ("condition", "rows"),
    [
        ("age > 3", [2]),
        ('age == 1 and `a town` == "Rome"', [0]),
        ("age + 1 <= 2 | age.isna()", [0, 1]),
        ('`a town` in ["Rome", "Oslo"] and not age < 0', [0, 1]),
        ('`a town` == "it\'s"', [2]),
        ("age.notnull() & -age < -3", [2]),
        ("`pay (EUR)` >= 2 and age > 0", [2]),
    ],
)
def test_comparisons_are_allowed_and_pandas_takes_them(condition: str, rows: list[int]) -> None:
    assert is_plain_condition(condition)
    assert FRAME.query(condition, engine="python").index.tolist() == rows


@pytest.mark.parametrize("condition", ['col("a town") == "Rome"', 'col("age").notNull()'])
def test_columns_may_be_named_as_great_expectations_does(condition: str) -> None:
    assert is_plain_condition(condition)


@pytest.mark.parametrize(
    "condition",
    [
        '@pd.io.common.os.system("true") == 0',
        "@pd",
        "age.to_pickle('/tmp/file')",
        "age.isna(1)",
        "age.isna().any()",
        "age.values",
        "__import__('os')",
        "(lambda: 1)()",
        "age[0] > 1",
        "[one for one in age]",
        "f'{age}' == ''",
        'age == "`" or @pd.io.common.os.system("true") or "`" == age',
        "col('age', @pd.io) > 1",
        "age >",
        "age > 1 # `",
        "age > 1\n@pd",
        "(" * 5_000,
        "",
        {"type": "comparison"},
        7,
    ],
    ids=lambda value: str(value)[:30],
)
def test_everything_else_is_refused(condition: object) -> None:
    assert not is_plain_condition(condition)


@given(st.text("age@pd.()[]`'\" >=1,col", max_size=30))
def test_no_condition_that_is_allowed_has_a_variable_of_pandas_outside_a_text(text: str) -> None:
    if is_plain_condition(text) and "'" not in text and '"' not in text:
        assert "@" not in text


def test_a_suite_with_such_a_condition_is_one_line(tmp_path: Path) -> None:
    kwargs = {"column": "age", "min_value": 0, "row_condition": '@pd.io.common.os.system("true")'}
    suite = [{"type": "expect_column_values_to_be_between", "kwargs": kwargs}]
    (tmp_path / "suite.json").write_text(json.dumps(suite))
    with pytest.raises(
        BadInput, match=r"entry 0: row_condition: got '@pd.*; allowed: compari"
    ) as e:
        read_suite(str(tmp_path / "suite.json"))
    assert "\n" not in str(e.value)
