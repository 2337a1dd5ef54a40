"""What a check of data found, as tables: failed expectations first, with rows that fail."""

from __future__ import annotations

from typing import Any

from trainwright.tasks.cli.screens import console
from trainwright.tasks.cli.screens.drift_table import show_drift
from trainwright.tasks.runs.artefacts.validation import Expectation, Validation
from trainwright.tasks.units import plain
from trainwright.tasks.validate.label_columns import target_of

_LONGEST = 24
"""characters of a value that was expected or observed"""


def show_validation(found: Validation) -> None:
    """Print the expectations, the first rows that fail, and the drift."""
    met = sum(one.success for one in found.expectations)
    title = (
        f"{found.checked_rows:,} rows; {met} of {len(found.expectations)} expectations met "
        f"(suite {found.suite_words})"
    )
    if found.suite_source == "none" and found.data is not None:
        title = f"{found.data.rows:,} rows, which the model's source reads; they are not checked"
    rows = [
        ("met" if one.success else "FAILED", one.column or "", _phrase(one), _observed(one))
        for one in sorted(found.expectations, key=lambda one: one.success)
    ]
    console.table(title, ("", "column", "expectation", "observed"), rows)
    for one in found.expectations:
        if one.sample_rows:
            _show_rows(one)
    show_drift(found.drift)


def _show_rows(one: Expectation) -> None:
    """The first rows that fail an expectation, without the figures about their labels."""
    names = [name for name in one.sample_rows[0] if name != "index" and target_of(name) is None]
    count = one.unexpected_count
    which = "row that fails" if count == 1 else "first rows that fail"
    of = f" of {count:,}" if count is not None and count > 1 else ""
    where = f"{one.column}, " if one.column else ""
    console.out.print(f"{where}{_phrase(one)}: the {which}{of}", markup=False)
    console.table(
        "",
        ("row", *names),
        [
            (str(row["index"]), *(_value(row.get(name)) for name in names))
            for row in one.sample_rows
        ],
        right=(0,),
    )


def _phrase(one: Expectation) -> str:
    """An expectation in words, such as `values to be between 0 and 1`."""
    words = one.expectation.removeprefix("expect_").removeprefix("column_").replace("_", " ")
    expected = {name: value for name, value in one.expected.items() if value is not None}
    least, most = expected.pop("min_value", None), expected.pop("max_value", None)
    if least is not None and most is not None:
        words += f" {_short(least)} and {_short(most)}"
    elif least is not None:
        words = f"{words.removesuffix('between')}at least {_short(least)}"
    elif most is not None:
        words = f"{words.removesuffix('between')}at most {_short(most)}"
    rest = [
        _short(value) if isinstance(value, list) else f"{name.replace('_', ' ')} {_short(value)}"
        for name, value in expected.items()
    ]
    return f"{words}: {', '.join(rest)}" if rest else words


def _observed(one: Expectation) -> str:
    """What was seen; of a failed expectation, in full."""
    if one.unexpected_count and one.observed is None:
        return f"{one.unexpected_count:,} missing"
    if one.unexpected_count == 0:
        return "all values"
    return _short(one.observed) if one.success else _value(one.observed)


def _value(value: Any) -> str:
    return "missing" if value is None else str(value)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return plain(value, 6) if abs(value) < 1e15 else f"{value:.6g}"
    text = "" if value is None else str(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
