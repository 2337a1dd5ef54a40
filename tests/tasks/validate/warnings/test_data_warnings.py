"""Warnings: columns that give the target away, rows that repeat, doubtful labels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import doors
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from trainwright.tasks import progress
from trainwright.tasks.data.prepared import prepared
from trainwright.tasks.data.row_split import validation_rows
from trainwright.tasks.runs.artefacts.validation import DataWarning
from trainwright.tasks.spec.data_spec import DataSpec
from trainwright.tasks.validate.check import validate
from trainwright.tasks.validate.duckdb_table import DuckDBDatabase, DuckDBTable
from trainwright.tasks.validate.step import validate_data
from trainwright.tasks.validate.warnings.leakage import leakage, sample
from trainwright.tasks.validate.warnings.neighbours import doubtful_labels
from trainwright.tasks.validate.warnings.repeated_rows import in_entries, in_table

ROWS = 2_000
Find = Callable[..., list[DataWarning]]


@pytest.fixture
def leaks(tmp_path: Path) -> Find:
    """Finds leakage in a table whose `label` are classes or quantities."""
    of = TableOf(tmp_path)
    return lambda columns, **kinds: of(
        columns, lambda table: leakage(table, sample(table), "label"), **kinds
    )


class TableOf:
    """Opens a table of columns for one function."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = 0

    def __call__(
        self,
        columns: dict[str, Any],
        found: Callable[[DuckDBTable], list[DataWarning]],
        classes: bool = True,
    ) -> list[DataWarning]:
        self.count += 1
        folder = self.folder / str(self.count)
        folder.mkdir()
        parquet.write_table(pa.table(columns), folder / "data.parquet")
        table = DuckDBTable([folder / "data.parquet"], folder)
        table.add_labels("label", classes=classes)
        try:
            return found(table)
        finally:
            table.close()


def honest(seed: int = 0) -> dict[str, Any]:
    """Inputs that tell something of the classes, and an identifier that does not."""
    random = np.random.default_rng(seed)
    label = random.integers(0, 3, ROWS)
    return {
        "good": label + random.normal(0, 0.5, ROWS),
        "noise": random.normal(size=ROWS),
        "colour": np.array(["red", "blue"])[random.integers(0, 2, ROWS)],
        "holes": pa.array(random.normal(size=ROWS), mask=random.random(ROWS) < 0.3),
        "id": random.permutation(ROWS),
        "label": label,
    }


def test_honest_columns_leak_nothing(leaks: Find) -> None:
    assert leaks(honest()) == []
    quantity = honest() | {"label": np.asarray(honest()["good"]) ** 2}
    del quantity["good"]
    assert leaks(quantity, classes=False) == []


@pytest.mark.parametrize(
    ("leak", "said"),
    [
        (lambda label: label, "it equals the target in all rows"),
        (lambda label: np.array(["x", "y", "z"])[label], "it is the target under other names"),
        (lambda label: label * 10 + np.arange(ROWS) % 4, "each of its 12 values has one value of"),
        (lambda label: label + np.linspace(0, 0.5, ROWS), "it alone predicts the target with a"),
        (lambda label: np.argsort(np.argsort(label, kind="stable")), "as an identifier, but it al"),
    ],
)
def test_a_column_that_gives_the_class_away_is_named(
    leaks: Find, leak: Callable[[Any], Any], said: str
) -> None:
    columns = honest()
    (found,) = leaks(columns | {"leak": leak(columns["label"])})
    assert (found.kind, found.column) == ("leakage", "leak")
    assert said in found.message
    assert found.rows == [0, 1, 2, 3, 4]


def test_a_column_that_is_a_function_of_a_quantity_is_named(leaks: Find) -> None:
    columns = honest()
    quantity = np.random.default_rng(1).lognormal(size=ROWS)
    del columns["good"]
    given = columns | {"label": quantity, "cents": np.round(100 * quantity)}
    (found,) = leaks(given, classes=False)
    assert found.column == "cents"
    (same,) = leaks(columns | {"label": quantity, "copy": quantity}, classes=False)
    assert same.message == "it equals the target in all rows"


def test_a_table_with_few_rows_or_an_empty_target_is_not_judged(leaks: Find) -> None:
    assert leaks({"copy": [0, 1] * 20, "label": [0, 1] * 20}) == []
    empty = pa.array([None] * ROWS, pa.float64())
    assert leaks(honest() | {"label": empty}, classes=False) == []
    assert leaks(honest() | {"label": pa.nulls(ROWS)}) == []
    assert leaks(honest() | {"label": ["a"] * ROWS}) == []
    assert leaks(honest() | {"label": [f"a{at}" for at in range(ROWS)]}, classes=False) == []


def brute_force(keys: list[Any], labels: list[Any], validation: list[int]) -> tuple[int, int]:
    """Validation rows whose key a training row has; rows whose key has several labels."""
    held_out = set(validation)
    train = {key for row, key in enumerate(keys) if row not in held_out}
    by_key: dict[Any, set[Any]] = {}
    for key, label in zip(keys, labels, strict=True):
        by_key.setdefault(key, set()).add(label)
    return (
        sum(keys[row] in train for row in validation),
        sum(len(by_key[key]) > 1 for key in keys),
    )


@pytest.mark.parametrize("seed", range(3))
def test_repeated_rows_are_counted_exactly(tmp_path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    x, y = random.integers(0, 30, ROWS), random.integers(0, 50, ROWS) / 7
    label = (x + random.integers(0, 2, ROWS)) % 3
    held_out = validation_rows(DataSpec(uri="x"), seed, ROWS)
    validation = np.flatnonzero(held_out)
    across, differing = brute_force(
        list(zip(x, y, strict=True)), list(label), [int(row) for row in validation]
    )
    found = TableOf(tmp_path)(
        {"x": x, "y": y, "label": label}, lambda table: in_table(table, "label", held_out)
    )
    duplicates, noise = found
    assert duplicates.message.startswith(f"{across:,} of 400 validation rows have the same inputs")
    assert set(duplicates.rows) <= set(validation.tolist())
    assert noise.message.startswith(f"{differing:,} rows have the same inputs")

    folder = tmp_path / "arrays"
    folder.mkdir()
    database = DuckDBDatabase(folder)
    entries = (pair.tobytes() for pair in np.stack([x, y], axis=1))
    assert in_entries(database, entries, label, held_out) == found
    database.close()


def test_rows_that_do_not_repeat_give_no_warning(tmp_path: Path) -> None:
    held_out = validation_rows(DataSpec(uri="x"), 0, ROWS)
    columns = {"x": np.arange(ROWS), "label": np.arange(ROWS) % 3}
    assert TableOf(tmp_path)(columns, lambda table: in_table(table, "label", held_out)) == []


def test_a_changed_label_among_like_rows_is_doubtful(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    label = random.integers(0, 3, ROWS)
    inputs = {f"x{at}": 8.0 * (label == at) + random.normal(size=ROWS) for at in range(3)}
    changed = label.copy()
    changed[[11, 500, 1999]] = (changed[[11, 500, 1999]] + 1) % 3

    def doubtful(table: DuckDBTable) -> list[DataWarning]:
        return doubtful_labels(table, sample(table), "label")

    of = TableOf(tmp_path)
    assert of(inputs | {"label": label}, doubtful) == []
    (found,) = of(inputs | {"label": changed}, doubtful)
    assert (found.kind, found.rows) == ("label_noise", [11, 500, 1999])


def test_labels_that_no_neighbour_predicts_are_not_doubtful(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    columns = {"x": random.normal(size=ROWS), "label": random.integers(0, 2, ROWS)}
    found = TableOf(tmp_path)(columns, lambda table: doubtful_labels(table, sample(table), "label"))
    assert found == []


def test_a_column_that_names_rows_is_warned_of_and_can_be_ignored(
    tmp_path: Path, home: Path
) -> None:
    path = tmp_path / "data.csv"
    lines = [f"c{n:03},{'xyz'[n % 3]},{n % 7},{'pq'[n % 2]}" for n in range(60)]
    path.write_text("\n".join(["customer,kind,a,label", *lines]) + "\n")
    found = validate(DataSpec(uri=str(path)))
    [warning] = [one for one in found.warnings if one.kind == "identifier"]
    assert warning.column == "customer"
    assert "data.ignore: [customer] leaves it out" in warning.message
    assert found.data is not None
    assert found.data.inputs == {"numbers": (1,), "categories": (2,)}
    ignored = validate(DataSpec(uri=str(path), ignore=("customer",)))
    assert [one.kind for one in ignored.warnings if one.kind == "identifier"] == []
    assert ignored.data is not None
    assert ignored.data.inputs == {"numbers": (1,), "categories": (1,)}
    made = prepared(DataSpec(uri=str(path), ignore=("customer",)), home)
    assert made.schema.inputs == ignored.data.inputs


@pytest.mark.parametrize("rows", [2, 40])
def test_a_notice_says_whether_there_are_more_rows_than_it_lists(
    tmp_path: Path, home: Path, rows: int
) -> None:
    path = tmp_path / "data.csv"
    repeated = [f"0.5,{'xy'[n % 2]}" for n in range(rows)]  # one input with both classes
    others = [f"{n}.25,{'xy'[n % 2]}" for n in range(60)]
    path.write_text("\n".join(["a,label", *repeated, *others]) + "\n")
    heard: list[dict[str, Any]] = []
    with progress.listening(heard.append):
        validate_data({"uri": str(path), "target": "label"}, doors.settings())
    [notice] = [one["message"] for one in heard if "of another class" in one.get("message", "")]
    assert notice.endswith("(rows 0, 1)" if rows == 2 else " …)")
