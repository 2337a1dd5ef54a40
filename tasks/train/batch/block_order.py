"""The order of an epoch with very many rows, made without an array of all of them.

Rows are shuffled in two steps, as streaming data loaders do: blocks of neighbouring rows get a
random order, and the rows of as many blocks as fit into a window are shuffled among each other.
So an epoch reads its data in blocks, one window at a time, and yet a batch has rows from
everywhere. An epoch starts its blocks at a random row, so that other rows are neighbours each time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BLOCK_BYTES = 16 * 2**10
WINDOW_BYTES = 32 * 2**20
MOST_BLOCK_ROWS = 128


class RowNumbers(Protocol):
    """Row numbers, of which consecutive ones can be read."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice, /) -> NDArray[Any]:
        """The row numbers at these places."""
        ...


@dataclass(frozen=True)
class Window:
    """A part of an epoch: its rows in the order of the file, and their order in the epoch."""

    begin: int
    """the first one's place in the epoch"""
    rows: NDArray[np.int64]
    order: NDArray[np.int64]


class BlockOrder:
    """An epoch's rows, by place; a function of seed and epoch, and of the size of a row."""

    def __init__(self, rows: RowNumbers, seed: int, epoch: int, row_bytes: int) -> None:
        import numpy as np

        self._rows, self._seed, self.epoch, self._row_bytes = rows, seed, epoch, row_bytes
        self._block = max(1, min(MOST_BLOCK_ROWS, BLOCK_BYTES // max(1, row_bytes), len(rows)))
        blocks = max(1, len(rows) // self._block)
        draw = np.random.Generator(np.random.PCG64([seed, epoch]))
        self._shift = int(draw.integers(len(rows)))
        self._blocks = draw.permutation(np.arange(blocks, dtype=np.int64))
        self._together = max(1, WINDOW_BYTES // max(1, row_bytes) // self._block)
        self.windows = max(1, blocks // self._together)
        self._held: dict[int, Window] = {}

    def following(self) -> BlockOrder:
        """The order of the next epoch."""
        return BlockOrder(self._rows, self._seed, self.epoch + 1, self._row_bytes)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, places: slice) -> NDArray[np.int64]:
        """The rows at these places of the epoch."""
        import numpy as np

        begin, end, _ = places.indices(len(self))
        parts = [np.empty(0, np.int64)]
        while begin < end:
            window = self.window(self.window_of(begin))
            last = min(end, window.begin + len(window.rows))
            parts.append(window.rows[window.order[begin - window.begin : last - window.begin]])
            begin = last
        return np.concatenate(parts)

    def window_of(self, place: int) -> int:
        """The number of the window that has this place of the epoch."""
        return min(place // (self._together * self._block), self.windows - 1)

    def window(self, number: int) -> Window:
        """A window. The last one has all remaining rows."""
        import numpy as np

        if (held := self._held.get(number)) is not None:
            return held
        begin = number * self._together
        last = number == self.windows - 1
        blocks = np.sort(self._blocks[begin : None if last else begin + self._together])
        rows = [self._block_rows(int(one), self._block) for one in blocks]
        if last and (rest := len(self) - len(self._blocks) * self._block):
            rows.append(self._block_rows(len(self._blocks), rest))
        found = np.concatenate(rows).astype(np.int64)
        draw = np.random.Generator(np.random.PCG64([self._seed, self.epoch, number]))
        window = Window(begin * self._block, found, draw.permutation(len(found)))
        # Replaced as a whole: another thread may read it.
        before = {key: one for key, one in self._held.items() if key == number - 1}
        self._held = {**before, number: window}
        return window

    def _block_rows(self, block: int, count: int) -> NDArray[Any]:
        import numpy as np

        begin = (block * self._block + self._shift) % len(self)
        part = self._rows[begin : begin + count]
        missing = count - len(part)
        return part if not missing else np.concatenate([part, self._rows[:missing]])
