"""The rows of a window of a large epoch, in memory, and those of the next one, read bit by bit.

While a window is used up, the next one fills: so reading costs every step the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainwright.tasks.data.dataset import Dataset
from trainwright.tasks.data.model_reader import ModelReader
from trainwright.tasks.train.batch.block_order import BlockOrder

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

Rows = tuple[dict[str, "Array"], "Array"]
_EARLIER = 1.25
"""The next window is full when four fifths of this one are used."""


class WindowRows:
    """Inputs and targets of one window of an epoch."""

    def __init__(self, order: BlockOrder, number: int) -> None:
        self.order, self.number, self._window = order, number, order.window(number)
        self.end = self._window.begin + len(self._window.rows)
        self.next: WindowRows | None = None
        self._filled = 0
        self._rows: Rows | None = None

    def fill(self, dataset: Dataset | ModelReader, share: float) -> None:
        """Read the rows, as its epoch sees them, until this share of them is in memory."""
        import numpy as np

        rows = self._window.rows
        wanted = min(len(rows), math.ceil(share * len(rows)))
        if wanted <= self._filled:
            return
        seen = dataset.in_epoch(self.order.epoch)
        inputs, targets = seen.batch(rows[self._filled : wanted])
        if self._rows is None:
            whole = {
                name: np.empty((len(rows), *one.shape[1:]), one.dtype)
                for name, one in inputs.items()
            }
            self._rows = whole, np.empty((len(rows), *targets.shape[1:]), targets.dtype)
        for name, one in inputs.items():
            self._rows[0][name][self._filled : wanted] = one
        self._rows[1][self._filled : wanted] = targets
        self._filled = wanted

    def at(self, begin: int, end: int) -> Rows:
        """The rows at these places of the epoch; the window must be full."""
        import numpy as np

        assert self._rows is not None
        chosen = self._window.order[begin - self._window.begin : end - self._window.begin]
        found = {name: np.take(one, chosen, axis=0) for name, one in self._rows[0].items()}
        return found, np.take(self._rows[1], chosen, axis=0)

    def is_of(self, order: BlockOrder, number: int) -> bool:
        """Whether this is a window of that epoch."""
        return (self.order.epoch, self.number) == (order.epoch, number)

    def advance(self, dataset: Dataset | ModelReader, end: int) -> None:
        """Read as much of the next window as is due when this one is used up to `end`.

        After the last window comes the next epoch's first.
        """
        if self.next is None:
            last = self.number + 1 == self.order.windows
            following = (self.order.following(), 0) if last else (self.order, self.number + 1)
            self.next = WindowRows(*following)
        used = (end - self._window.begin) / len(self._window.rows)
        self.next.fill(dataset, _EARLIER * used)


def joined(parts: Sequence[Rows]) -> Rows:
    """The rows of all parts, in order."""
    import numpy as np

    inputs = {name: np.concatenate([one[0][name] for one in parts]) for name in parts[0][0]}
    return inputs, np.concatenate([one[1] for one in parts])
