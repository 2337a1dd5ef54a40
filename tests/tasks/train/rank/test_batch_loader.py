"""Batches that are read ahead: the same rows, for any steps, splits and changes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from trainwright.tasks.data import prepared as prepared_module
from trainwright.tasks.data.dataset import Dataset
from trainwright.tasks.data.prepared import prepared
from trainwright.tasks.data.row_file import RowFile
from trainwright.tasks.spec.data_spec import DataSpec
from trainwright.tasks.train.batch import block_order
from trainwright.tasks.train.batch.block_order import BlockOrder
from trainwright.tasks.train.batch.sampling import epoch_order, own_places
from trainwright.tasks.train.rank import batch_loader
from trainwright.tasks.train.rank.batch_loader import BatchLoader

ROWS = 3000
CPU = torch.device("cpu")


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Dataset:
    """A table with numbers and categories that counts as large: read by rows, and ahead."""
    monkeypatch.setattr(prepared_module, "_MAPPED_BYTES", 0)
    monkeypatch.setattr(prepared_module, "_SPLIT_HERE", 0)
    monkeypatch.setattr(batch_loader, "_SMALL_BYTES", 0)
    monkeypatch.setattr(block_order, "WINDOW_BYTES", 4000)
    monkeypatch.setattr(block_order, "BLOCK_BYTES", 100)
    lines = (f"{n},{n / 7},{'abc'[n % 3]},{n % 2}\n" for n in range(ROWS))
    (tmp_path / "table.csv").write_text("x,y,c,label\n" + "".join(lines))
    found = prepared(DataSpec(uri=str(tmp_path / "table.csv")), tmp_path / "home")
    assert isinstance(found.targets, RowFile)
    assert isinstance(found.split.train, RowFile)
    return found


@pytest.mark.parametrize("blocks", [True, False])
def test_batches_are_the_rows_of_the_order_through_all_changes(
    dataset: Dataset, blocks: bool
) -> None:
    def order_of(epoch: int) -> BlockOrder | np.ndarray:
        if blocks:
            return BlockOrder(dataset.split.train, 0, epoch, dataset.row_bytes)
        return epoch_order(dataset.split.train, 0, epoch)

    loader, steps = BatchLoader(dataset, CPU), 0
    splits = [[100, 50], [40, 20], [70, 80], [7, 0]]
    for epoch in range(2):
        order, begin = order_of(epoch), 0
        while begin < len(order):
            split = splits[steps // 5 % 4]  # a change drops what was read ahead
            own, total = own_places(len(order), begin, split, 1)
            following, later = [], begin + total
            while later < len(order):
                places, more = own_places(len(order), later, split, 1)
                following.append(places)
                later += more
            found, rows = loader.batch(order, own, following), order[slice(*own)]
            if not len(rows):
                assert found is None
            else:
                assert found is not None
                inputs, targets = found
                assert inputs["numbers"][:, 0].tolist() == [float(row) for row in rows]
                assert targets.tolist() == (rows % 2).tolist()
                assert inputs["categories"].ravel().tolist() == (rows % 3 + 1).tolist()
            begin, steps = begin + total, steps + 1
    again = loader.batch(order, (0, 10))  # back to the beginning
    assert again is not None
    assert again[0]["numbers"][:, 0].tolist() == [float(row) for row in order[:10]]


@pytest.mark.parametrize("cheap", [True, False])
@pytest.mark.parametrize("size", [1, 64, 599, 600, 1000])
def test_rows_in_turn_are_those_of_the_data_in_order(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch, size: int, cheap: bool
) -> None:
    if cheap:
        monkeypatch.setattr(batch_loader, "_SMALL_BYTES", 2**30)
    loader, rows = BatchLoader(dataset, CPU), dataset.split.validation
    assert (loader.ahead == 0) is cheap
    batches = list(loader.in_turn(rows, size))
    assert [len(targets) for _, targets in batches[:-1]] == [size] * (len(batches) - 1)
    wanted, targets = loader.rows(rows[: len(rows)])
    for name, one in wanted.items():
        assert torch.equal(torch.cat([inputs[name] for inputs, _ in batches]), one)
    assert torch.equal(torch.cat([found for _, found in batches]), targets)
    assert list(loader.in_turn(rows[:0], size)) == []


class Counted:
    """A dataset that counts the batches that it was asked for."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset, self.read = dataset, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dataset, name)

    def batch(self, rows: Any) -> Any:
        self.read += 1
        return self.dataset.batch(rows)


def test_rows_in_turn_are_read_ahead_by_a_few_batches_only(dataset: Dataset) -> None:
    counted = Counted(dataset)
    loader = BatchLoader(cast("Dataset", counted), CPU)
    batches = loader.in_turn(dataset.split.validation, 100)
    next(batches)
    loader.batch(dataset.split.train, (0, 10))  # the one thread reads this after all before it
    assert counted.read == 1 + loader.ahead + 1
    batches.close()
    loader.batch(dataset.split.train, (10, 20))
    assert counted.read == 1 + loader.ahead + 2


def test_an_error_of_the_thread_reaches_the_step(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader, order = BatchLoader(dataset, CPU), epoch_order(dataset.split.train, 0, 0)
    [file] = (tmp_path / "home" / "prepared").glob("*/targets.npy")
    with file.open("r+b") as content:
        content.truncate(200)
    loader.batch(order, (0, 0), [(0, 400)])
    with pytest.raises(OSError, match="the file of prepared data was cut off"):
        loader.batch(order, (0, 400))
