"""Reads a rank's batches, and those of the next steps while a step computes.

A batch is a range of places in an epoch's order. After each one, the ranges of the next steps are
predicted and read by a thread. If a step needs another range, because the split or the batch size
changed, what was read ahead is dropped. So a step gets the same rows with and without reading
ahead. Validation and statistics of the training rows read theirs in turn, also ahead.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np  # noqa: TID253 - only ranks import this
import torch  # noqa: TID253

from trainwright.tasks.data.dataset import Dataset
from trainwright.tasks.data.model_reader import ModelReader
from trainwright.tasks.train.batch.block_order import BlockOrder
from trainwright.tasks.train.rank.window_rows import Rows, WindowRows, joined

_AHEAD = 2
_KEPT_BYTES = 256 * 2**20
"""Data of at most this size is kept on a GPU."""
_SMALL_BYTES = 64 * 2**20
"""A batch of data of at most this size is read at once, which is quicker than to ask a thread."""
Places = tuple[int, int]
BatchTensors = tuple[dict[str, torch.Tensor], torch.Tensor]


class BatchLoader:
    """The inputs and targets of rows, in host memory; on a GPU if the data is small.

    `ahead`: how many steps' rows are read ahead. `wait_s`: the time that steps waited for rows.
    """

    def __init__(self, dataset: Dataset | ModelReader, device: torch.device) -> None:
        self._dataset = self._training = dataset
        self.wait_s = 0.0
        self._kept: BatchTensors | None = None
        if dataset.nbytes <= _KEPT_BYTES and not dataset.costly and device.type != "cpu":
            inputs, targets = self.rows(np.arange(dataset.schema.rows))
            kept = {name: tensor.to(device) for name, tensor in inputs.items()}
            self._kept = kept, targets.to(device)
        self._device = device
        cheap = dataset.nbytes <= _SMALL_BYTES and not dataset.costly
        small = self._kept is not None or cheap
        self.ahead = 0 if small else _AHEAD
        self._thread = None if small else ThreadPoolExecutor(1, "read-ahead")
        self._order: Any = None
        self._read_ahead: dict[Places, Future[Rows]] = {}
        self._window: WindowRows | None = None

    def begin_epoch(self, epoch: int) -> None:
        """Read batches as this epoch of training sees them."""
        self._training = self._dataset.in_epoch(epoch)

    def rows(self, rows: Any) -> BatchTensors:
        """Some rows, by their numbers, as they are."""
        if self._kept is not None:
            index = torch.as_tensor(rows, device=self._device)
            return {name: kept[index] for name, kept in self._kept[0].items()}, self._kept[1][index]
        return _tensors(self._dataset.batch(rows))

    def in_turn(self, rows: Any, size: int) -> Iterator[BatchTensors]:
        """Some rows, as they are, in batches of at most `size`; later ones are read ahead."""
        begins = iter(range(0, len(rows), size))
        if self._thread is None:
            for at in begins:
                yield self.rows(rows[at : at + size])
            return

        def read(at: int) -> Rows:
            return self._dataset.batch(rows[at : at + size])

        pending: deque[Future[Rows]] = deque()
        try:
            for at in itertools.islice(begins, 1 + self.ahead):
                pending.append(self._thread.submit(read, at))
            while pending:
                yield _tensors(pending.popleft().result())
                for at in itertools.islice(begins, 1):
                    pending.append(self._thread.submit(read, at))
        finally:
            for unread in pending:
                unread.cancel()

    def batch(
        self, order: Any, own: Places, following: Sequence[Places] = ()
    ) -> BatchTensors | None:
        """The rows at some places of an epoch's order; None if there are none.

        `following`: the places of the next steps.
        """
        started = time.perf_counter()
        found: BatchTensors | None = None
        if self._thread is None:
            found = self.rows(order[slice(*own)]) if own[0] < own[1] else None
        else:
            if order is not self._order:
                self._drop_read_ahead()
            self._order = order
            if own[0] < own[1]:
                found = _tensors(self._awaited(self._thread, order, own))
            for wanted in following[: self.ahead]:
                if wanted[0] < wanted[1] and wanted not in self._read_ahead:
                    self._read_ahead[wanted] = self._thread.submit(self._read, order, wanted)
        self.wait_s += time.perf_counter() - started
        return found

    def _awaited(self, thread: ThreadPoolExecutor, order: Any, own: Places) -> Rows:
        found = self._read_ahead.pop(own, None)
        if found is None:
            self._drop_read_ahead()
            found = thread.submit(self._read, order, own)
        return found.result()

    def _drop_read_ahead(self) -> None:
        for other in self._read_ahead.values():
            other.cancel()
        self._read_ahead = {}

    def _read(self, order: Any, places: Places) -> Rows:
        """In the thread: the rows at these places, and a part of the next window."""
        if not isinstance(order, BlockOrder):
            return self._training.batch(order[slice(*places)])
        begin, end = places
        parts = []
        while begin < end:
            window = self._opened(order, order.window_of(begin))
            last = min(end, window.end)
            parts.append(window.at(begin, last))
            begin = last
            window.advance(self._dataset, last)
        return parts[0] if len(parts) == 1 else joined(parts)

    def _opened(self, order: BlockOrder, number: int) -> WindowRows:
        """A window with all of its rows."""
        held = self._window
        if held is not None and held.next is not None and held.next.is_of(order, number):
            held = held.next
        elif held is None or not held.is_of(order, number):
            held = WindowRows(order, number)
        held.fill(self._dataset, 1.0)
        self._window = held
        return held


def _tensors(rows: Rows) -> BatchTensors:
    inputs, targets = rows
    return {name: torch.from_numpy(one) for name, one in inputs.items()}, torch.from_numpy(targets)
