"""The page of rejected data, and the parts that it shares with the report of a run."""

from __future__ import annotations

import json
from html import escape
from typing import Any

from trainwright.tasks.html_page import html_page, table, tiles
from trainwright.tasks.runs.artefacts.data_profile import Drift
from trainwright.tasks.runs.artefacts.validation import DataWarning, Expectation, Validation
from trainwright.tasks.units import counted
from trainwright.tasks.validate.drift.compare_profiles import drift_line
from trainwright.tasks.validate.drift.histograms import picture

_MOST_SHOWN = 200
_MOST_PICTURES = 20


def rejection_page(job: str, run: str, validation: Validation) -> str:
    """The page, which needs no other file. `run`: the run's URI. Names and values are escaped."""
    failed = [one for one in validation.expectations if not one.success]
    drifted = validation.drift.drifted if validation.drift is not None else []
    figures = [
        (f"{validation.checked_rows:,}", "rows checked"),
        (f"{len(failed)} of {len(validation.expectations)}", "expectations failed"),
        (str(len(drifted)), "columns drifted"),
        (str(len(validation.warnings)), "warnings"),
    ]
    return html_page(
        f"{job}: data rejected",
        f"<h1>{escape(job)}: data rejected</h1><p>{escape(run)}</p>"
        f"<p>Suite: {escape(validation.suite_words)}.</p>"
        f"{tiles(figures)}{_failures(failed)}{drift_section(validation.drift)}"
        f"{warning_section(validation.warnings)}"
        f"<h2>Expectations met</h2>{_met(validation)}",
    )


def _failures(failed: list[Expectation]) -> str:
    if not failed:
        return ""
    parts = ["<h2>Expectations failed</h2>"]
    for one in failed[:_MOST_SHOWN]:
        column = f" of <b>{escape(one.column)}</b>" if one.column is not None else ""
        rows = f": {counted(one.unexpected_count, 'row')}" if one.unexpected_count else ""
        parts.append(f'<h3 class="bad">{escape(expectation_words(one))}{column}{rows}</h3>')
        shown = [
            (escape(name.replace("_", " ")), _value(value))
            for name, value in one.expected.items()
            if value is not None
        ]
        shown.append(("observed", escape(observed_words(one))))
        parts.append(table(["", ""], [list(line) for line in shown], set()))
        if one.sample_rows:
            names = list(one.sample_rows[0])
            rows_shown = [[_value(row.get(name)) for name in names] for row in one.sample_rows]
            heads = ["row" if name == "index" else escape(name) for name in names]
            parts.append("<p>The first of these rows:</p>" + table(heads, rows_shown, {0}))
    if len(failed) > _MOST_SHOWN:
        parts.append(f"<p>and {len(failed) - _MOST_SHOWN} more</p>")
    return "".join(parts)


def _met(validation: Validation) -> str:
    met = [one for one in validation.expectations if one.success]
    rows = [
        [escape(one.column or ""), escape(expectation_words(one)), escape(observed_words(one))]
        for one in met[:_MOST_SHOWN]
    ]
    more = f"<p>and {len(met) - _MOST_SHOWN} more</p>" if len(met) > _MOST_SHOWN else ""
    if not rows:
        return "<p>None.</p>"
    return table(["column", "expectation", "observed"], rows, set()) + more


def drift_section(drift: Drift | None) -> str:
    """The columns that drifted, each with a picture of both distributions."""
    if drift is None or drift.reference is None:
        return ""
    where = escape(drift.reference)
    if not drift.drifted:
        return f"<p>No column drifted from {where}.</p>"
    parts = [
        f"<h2>Drift</h2><p>Columns that drifted from {where}. "
        "Blue: this data; grey: the reference.</p>"
    ]
    parts += [f"<p>{escape(line)}</p>{drawn}" for line, drawn in drifted_columns(drift)]
    return "".join(parts)


def drifted_columns(drift: Drift) -> list[tuple[str, str]]:
    """Each drifted column in words, with a picture as SVG; empty if it has none."""
    return [
        (
            drift_line(column),
            picture(column.histogram) if column.histogram and place < _MOST_PICTURES else "",
        )
        for place, column in enumerate(drift.drifted)
    ]


def warning_section(warnings: list[DataWarning]) -> str:
    """The warnings, which reject nothing."""
    if not warnings:
        return ""
    rows = [
        [
            escape(one.kind.replace("_", " ")),
            escape(one.column or ""),
            escape(one.message),
            ", ".join(str(row) for row in one.rows),
        ]
        for one in warnings
    ]
    heads = ["kind", "column", "", "first rows"]
    return f"<h2>Warnings about the data</h2>{table(heads, rows, set())}"


def expectation_words(one: Expectation) -> str:
    """An expectation's name as words: values to be between."""
    return one.expectation.removeprefix("expect_").removeprefix("column_").replace("_", " ")


def observed_words(one: Expectation) -> str:
    """What the data has: the value, or the rows, if the expectation is about each of them."""
    if one.observed is not None:
        return _text(one.observed)
    if one.unexpected_count:
        lacking = "null" in one.expectation
        return f"{counted(one.unexpected_count, 'row')}{' without a value' if lacking else ''}"
    return "as expected" if one.success else "not known"


def failures(validation: Validation) -> list[dict[str, Any]]:
    """The failed expectations for a screen, at most the first 200."""
    return [
        {
            "column": one.column,
            "words": expectation_words(one),
            "expected": {
                name.replace("_", " "): _text(value)
                for name, value in one.expected.items()
                if value is not None
            },
            "observed": observed_words(one),
            "rows": one.unexpected_count,
            "first_rows": [row["index"] for row in one.sample_rows],
        }
        for one in validation.expectations
        if not one.success
    ][:_MOST_SHOWN]


def _value(value: Any) -> str:
    return escape(_text(value))


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 300 else text[:297] + "..."
