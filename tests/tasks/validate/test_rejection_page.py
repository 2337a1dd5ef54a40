"""The page of rejected data, and the sections that the report shares with it."""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa

from trainwright.tasks.runs.artefacts.data_profile import ColumnProfile, Drift
from trainwright.tasks.runs.artefacts.validation import DataWarning, Expectation, Validation
from trainwright.tasks.validate.drift.compare_profiles import compare
from trainwright.tasks.validate.drift.histograms import histogram, picture
from trainwright.tasks.validate.drift.profile import profile
from trainwright.tasks.validate.rejection_page import rejection_page

HOSTILE = "<script>alert('&')</script>"


def rejected(drift: Drift | None = None) -> Validation:
    """A validation with one failed expectation, one met, and a warning, with hostile names."""
    failed = Expectation(
        expectation="expect_column_values_to_be_between",
        column=HOSTILE,
        expected={"max_value": 3, "min_value": None},
        success=False,
        observed=[7.5],
        unexpected_count=1200,
        sample_rows=[{"index": 41, HOSTILE: 7.5, "label": "ü"}],
    )
    met = Expectation(expectation="expect_column_to_exist", column="a", success=True, observed=None)
    warning = DataWarning(kind="label_noise", column=HOSTILE, message=HOSTILE, rows=[3, 9])
    return Validation(
        success=False,
        suite_source="kept",
        suite=[],
        suite_version="0123456789abcdef",
        suite_profile="fedcba9876543210",
        expectations=[failed, met],
        checked_rows=5000,
        great_expectations={},
        drift=drift,
        warnings=[warning],
    )


def column(values: object) -> ColumnProfile:
    batches = pa.table({"x": pa.array(values)}).to_batches()
    return profile(batches, "label", classes=False).columns["x"]


def test_the_page_says_what_failed_with_rows_and_needs_nothing_else() -> None:
    shown = rejection_page(HOSTILE, "s3://b/runs/x/1", rejected())
    assert "<script" not in shown
    assert not re.search(r"(src|href)=|https?://", shown)
    for text in (
        "1 of 2",
        "values to be between",
        "1,200 rows",
        "Suite: kept, version 0123456789ab, inferred from profile fedcba987654.",
        ">41<",
        "3, 9",
        "ü",
        "s3://b/runs",
    ):
        assert text in shown


def test_the_page_has_a_picture_of_each_column_that_drifted() -> None:
    random = np.random.default_rng(0)
    tables = [
        pa.table({"x": random.normal(shift, 1, 2000), HOSTILE: [HOSTILE] * (2000 - n) + ["b"] * n})
        for shift, n in ((0.0, 100), (1.0, 900))
    ]
    before, now = (profile(one.to_batches(), "label", classes=False) for one in tables)
    columns = compare(now, before)
    shown = rejection_page("job", "uri", rejected(Drift(reference="uri", columns=columns)))
    assert shown.count("<svg") == 2
    assert "<script" not in shown


def test_the_bars_of_numbers_have_the_shares_of_both() -> None:
    random = np.random.default_rng(1)
    values = [random.normal(size=4000), random.normal(1, 2, 4000)]
    found = histogram(*(column(one) for one in values))
    assert found is not None
    assert found.ordered
    low, high = float(found.labels[0]), float(found.labels[-1])
    edges = np.linspace(low, high, len(found.now) + 1)
    edges[0], edges[-1] = -np.inf, np.inf
    for given, shares in zip(values, (found.now, found.reference), strict=True):
        counted = np.histogram(given, edges)[0] / len(given)
        assert np.abs(np.array(shares) - counted).max() < 0.02
    assert picture(found).count("<rect") == 2 * len(found.now)


def test_few_values_and_other_kinds_have_their_picture_or_none() -> None:
    constant = histogram(column([5] * 9), column([5] * 4))
    assert constant is not None
    assert (constant.now, constant.reference) == ([1.0], [1.0])
    texts = histogram(column([f"v{at}" for at in range(40)]), column(["v1"] * 4))
    assert texts is not None
    assert len(texts.labels) == 9
    assert (texts.labels[0], texts.labels[-1]) == ("v1", "others")
    assert sum(texts.now) == sum(texts.reference) == 1
    assert histogram(column([1.0]), column(["a"])) is None
    extreme = histogram(column([-1.7e308, 0.0, 1.7e308]), column([0.0, 1.0]))
    assert extreme is not None
    assert sum(extreme.now) == 1
