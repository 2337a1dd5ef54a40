"""Which rows are held out: at random, with every class in both parts, by time, by group."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.tasks.data.dataset import from_raw
from trainwright.tasks.data.formats import Raw
from trainwright.tasks.data.row_split import split_keys, validation_rows
from trainwright.tasks.errors import BadInput
from trainwright.tasks.spec.data_spec import DataSpec
from trainwright.tasks.spec.documents import validated

CLASSES = st.lists(st.integers(0, 8), min_size=4, max_size=120)
SEEDS = st.integers(0, 2**31 - 1)


def spec(**fields: Any) -> DataSpec:
    return DataSpec(uri="-", **fields)


@given(rows=st.integers(2, 3000), fraction=st.floats(0.001, 0.999), seed=SEEDS)
def test_a_split_by_rows_is_numpys_permutation(rows: int, fraction: float, seed: int) -> None:
    order = np.random.Generator(np.random.PCG64(seed)).permutation(rows)
    count = min(max(round(rows * fraction), 1), rows - 1)
    held_out = validation_rows(spec(validation_fraction=fraction), seed, rows)
    assert np.array_equal(np.flatnonzero(held_out), np.sort(order[:count]))


@given(classes=CLASSES, seed=SEEDS)
def test_both_parts_have_every_class_with_two_rows_and_nothing_changes_needlessly(
    classes: list[int], seed: int
) -> None:
    labels = np.array(classes)
    by_chance = validation_rows(spec(stratify="false"), seed, len(labels), labels)
    held_out = validation_rows(spec(), seed, len(labels), labels)
    frequent = {one for one in classes if classes.count(one) > 1}
    assert frequent <= set(labels[held_out].tolist())
    assert frequent <= set(labels[~held_out].tolist())
    assert held_out.any()
    assert not held_out.all()
    if frequent <= set(labels[by_chance].tolist()) & set(labels[~by_chance].tolist()):
        assert np.array_equal(held_out, by_chance)


@given(classes=CLASSES, seed=SEEDS, fraction=st.floats(0.1, 0.5))
def test_a_stratified_split_has_the_share_of_each_class(
    classes: list[int], seed: int, fraction: float
) -> None:
    labels = np.array(classes)
    wanted = spec(stratify="true", validation_fraction=fraction)
    held_out = validation_rows(wanted, seed, len(labels), labels)
    assert held_out.any()
    assert not held_out.all()
    for one in set(classes):
        rows, of_class = classes.count(one), int(held_out[labels == one].sum())
        if rows > 1 and len(set(classes)) > 1:
            assert 1 <= of_class < rows
            assert abs(of_class - fraction * rows) <= 1.5


@given(times=st.lists(st.integers(-5, 50), min_size=2, max_size=80), seed=SEEDS)
def test_a_split_by_time_holds_out_the_latest_rows(times: list[int], seed: int) -> None:
    keys, wanted = np.array(times), spec(split="time", split_by="when")
    if len(set(times)) == 1:
        with pytest.raises(BadInput, match=r"data\.split_by: 'when' is the same in all"):
            validation_rows(wanted, seed, len(keys), keys=keys)
        return
    held_out = validation_rows(wanted, seed, len(keys), keys=keys)
    assert keys[~held_out].max() < keys[held_out].min()


@given(groups=st.lists(st.integers(0, 20), min_size=2, max_size=80), seed=SEEDS)
def test_a_split_by_group_keeps_groups_whole(groups: list[int], seed: int) -> None:
    keys, wanted = np.array(groups), spec(split="group", split_by="who")
    if len(set(groups)) == 1:
        with pytest.raises(BadInput, match="allowed: at least two groups"):
            validation_rows(wanted, seed, len(keys), keys=keys)
        return
    held_out = validation_rows(wanted, seed, len(keys), keys=keys)
    assert not set(keys[held_out].tolist()) & set(keys[~held_out].tolist())
    assert held_out.any()
    assert not held_out.all()


@pytest.mark.parametrize(
    "values",
    [
        pa.array([3, 1, 2]),
        pa.array([0.5, -1.5, 0.25]),
        pa.array([3, 1, 2]).cast(pa.timestamp("s")),
        pa.array([3, 1, 2], pa.int32()).cast(pa.date32()),
    ],
    ids=str,
)
def test_keys_have_the_order_of_the_times(values: Any) -> None:
    keys = split_keys(values, spec(split="time", split_by="when"))
    assert np.argsort(keys).tolist() == [1, 2, 0]


def test_the_column_that_splits_is_no_input() -> None:
    columns = {
        "when": pa.array(range(20)).cast(pa.timestamp("s")),
        "who": [f"person {n % 4}" for n in range(20)],
        "x": [float(n) for n in range(20)],
        "label": [n % 2 for n in range(20)],
    }
    by_time = from_raw(Raw("", pa.table(columns)), spec(split="time", split_by="when"))
    assert [one.name for one in by_time.schema.columns] == ["who", "x"]
    assert by_time.split.validation.tolist() == [16, 17, 18, 19]
    del columns["when"]
    by_group = from_raw(Raw("", pa.table(columns)), spec(split="group", split_by="who"))
    assert [one.name for one in by_group.schema.columns] == ["x"]
    assert len({row % 4 for row in by_group.split.validation.tolist()}) == 1


@pytest.mark.parametrize(
    ("column", "fields", "said"),
    [
        (None, {"split_by": "w", "split": "time"}, "data.split_by: got 'w'; allowed: a column of"),
        ([1, None], {"split": "time"}, "'when': 10 values are missing"),
        (["a", "b"], {"split": "time"}, "holds texts; allowed: times or numbers"),
        ([1.0, float("nan")], {"split": "group"}, "'when' has NaN; allowed: none"),
    ],
)
def test_a_column_that_can_not_split_is_refused(
    column: list[Any] | None, fields: dict[str, Any], said: str
) -> None:
    columns: dict[str, Any] = {"x": [float(n) for n in range(20)], "label": [0, 1] * 10}
    if column is not None:
        columns["when"] = column * 10
    with pytest.raises(BadInput, match=said):
        from_raw(Raw("", pa.table(columns)), spec(**{"split_by": "when", **fields}))


def test_stratify_takes_the_words_of_yaml() -> None:
    for word, kept in ((True, "true"), (False, "false"), ("auto", "auto")):
        assert validated(DataSpec, {"uri": "a", "stratify": word}, "data").stratify == kept
    with pytest.raises(BadInput, match="stratify: got 3; allowed: 'auto', 'true' or 'false'"):
        validated(DataSpec, {"uri": "a", "stratify": 3}, "data")


@pytest.mark.parametrize("fields", [{"split": "time"}, {"split_by": "when"}])
def test_a_split_names_its_column(fields: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="split_by with split: time or split: group"):
        validated(DataSpec, {"uri": "a.csv", **fields}, "data")


def test_arrays_are_split_by_rows_only() -> None:
    raw = Raw("", pa.table({"label": [0, 1] * 5}), {"inputs": np.ones((10, 2))})
    with pytest.raises(BadInput, match="got time; allowed for arrays and images: rows"):
        from_raw(raw, spec(split="time", split_by="when"))
