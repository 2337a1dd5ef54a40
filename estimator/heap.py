"""Memory that a sequence of blocks keeps resident: glibc's malloc of large blocks, played on their sizes. Loads no torch.

What matters of malloc/malloc.c (2.36): torch asks for blocks at multiples of 64 bytes, so malloc takes a chunk larger by 96, and
frees both ends. Small things that belong to tensors made a little later then live in these ends, and until they are gone freed
chunks do not join: a hole is too small for a block of its own size, and is split for smaller ones. The smallest hole that is
large enough is taken. What fits none extends the heap, or, from a threshold on, is a mapping of its own, given back when freed.
The threshold rises to each mapping that is given back, up to 32 MiB; from twice that the heap's free end is given back too.

Which small things these are differs between processes, as addresses do: whoever asks draws how much later they are made.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trainwright.estimator.freed_memory import MOST_HEAP_BLOCK_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray


_ALIGNMENT, _LEAST_CHUNK, _HEADER, _PAGE = 64, 32, 8, 4096
_FIRST_THRESHOLD = 2**20  # 128 KiB where a process starts; importing torch raises it
_PAD = 128 * 2**10  # M_TOP_PAD


Chunk = tuple[int, int]
"""Place and size; place -1: a mapping."""


class Heap:
    """The main arena, empty, of a process that has loaded torch."""

    def __init__(self) -> None:
        self.high_bytes = 0.0
        self.besides = 0.0  # bytes that are resident outside this heap
        self._mapped, self._threshold = 0, _FIRST_THRESHOLD
        self._top = self._end = self._touched = 0  # the free end begins at _top; the heap ends at _end
        self._sizes: list[Chunk] = []  # of holes: (size, place), ascending
        self._starts: dict[int, int] = {}  # of holes: place -> size
        self._ends: dict[int, int] = {}  # of holes: end -> place

    def allocate(self, size: float) -> tuple[Chunk, list[Chunk]]:
        """posix_memalign: the chunk of a block, and the ends that were cut off for its alignment, to be freed by the caller."""
        chunk = (int(size) + _HEADER + 15) & ~15
        asked = chunk + _ALIGNMENT + _LEAST_CHUNK
        place = bisect_left(self._sizes, (asked, -1))
        if place < len(self._sizes):
            found, start = self._sizes.pop(place)
            del self._starts[start], self._ends[start + found]
        else:
            found, start = asked, self._top
            if self._end - start < asked + _LEAST_CHUNK:
                if asked >= self._threshold:
                    pages = (asked + _HEADER + _PAGE - 1) & -_PAGE
                    self._mapped += pages
                    self.note()
                    return (-1, pages), []
                self._end = (start + asked + _PAD + _LEAST_CHUNK + _PAGE - 1) & -_PAGE
            self._top = start + asked
        lead = -(start + 2 * _HEADER) % _ALIGNMENT
        if 0 < lead < _LEAST_CHUNK:
            lead += _ALIGNMENT
        ends = [(start, lead)] if lead else []
        start += lead
        if start + chunk > self._touched:
            self._touched = start + chunk
        self.note()
        rest = found - lead - chunk
        tail = min(rest, _ALIGNMENT + _LEAST_CHUNK - lead)
        if tail < _LEAST_CHUNK:
            tail = rest if rest < 2 * _LEAST_CHUNK else 0
            if rest > tail:
                self.free(start + chunk, rest)
            return (start, chunk + tail), ends
        ends.append((start + chunk, tail))
        if rest > tail:
            self.free(start + chunk + tail, rest - tail)
        return (start, chunk), ends

    def free(self, place: int, size: int) -> None:
        """Give a chunk back; it joins with free neighbours."""
        if place < 0:
            self._mapped -= size
            if self._threshold < size <= MOST_HEAP_BLOCK_BYTES:
                self._threshold = size
            return
        before = self._ends.pop(place, None)
        if before is not None:
            whole = self._starts.pop(before)
            del self._sizes[bisect_left(self._sizes, (whole, before))]
            place, size = before, size + whole
        after = self._starts.pop(place + size, None)
        if after is not None:
            del self._sizes[bisect_left(self._sizes, (after, place + size))]
            size += after
            del self._ends[place + size]
        if place + size != self._top:
            self._starts[place], self._ends[place + size] = size, place
            insort(self._sizes, (size, place))
            return
        self._top = place
        if self._end - place >= 2 * self._threshold:
            self._end = (place + _LEAST_CHUNK + _PAD + _PAGE) & -_PAGE
            self._touched = min(self._touched, self._end)

    def note(self) -> None:
        """Keep the most that was resident."""
        resident = self._touched + self._mapped + self.besides
        if resident > self.high_bytes:
            self.high_bytes = resident


def high_water_bytes(
    numbers: NDArray[Any], sizes: NDArray[Any], least_bytes: float, behind: Callable[[], int]
) -> float:
    """The most resident at once, of blocks by number as they are made and freed; `sizes` in bytes, negative where one is freed.

    Blocks below `least_bytes` are counted as they are. An end of a block is in use as long as the block lives that is made as the
    `behind()`th after it (0: as long as itself).
    """
    import numpy as np

    heap = Heap()
    blocks: dict[int, Chunk] = {}
    in_use: dict[int, list[Chunk]] = {}
    due: dict[int, list[Chunk]] = {}  # by the number of blocks that were made before
    made = 0
    large = np.abs(sizes) >= least_bytes
    small = np.cumsum(np.where(large, 0.0, sizes))
    places = np.flatnonzero(large)
    # Of the small ones: the most before each block, and after the last.
    most = np.maximum.reduceat(small, [0, *places]) if len(small) else [0.0]
    played = zip(numbers[places].tolist(), sizes[places].tolist(), most, small[places].tolist(), strict=False)
    for number, size, besides_at_most, besides in played:
        heap.besides = besides_at_most
        heap.note()
        heap.besides = besides
        if size < 0:
            heap.free(*blocks.pop(number))
            for end in in_use.pop(number):
                heap.free(*end)
        else:
            blocks[number], ends = heap.allocate(size)
            for end in ends:
                due.setdefault(made + behind(), []).append(end)
            in_use[number] = due.pop(made, [])
            made += 1
    heap.besides = float(most[-1])
    heap.note()
    return heap.high_bytes
