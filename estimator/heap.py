"""Where glibc's allocator puts blocks, and how much memory that keeps resident: arithmetic on sizes, nothing is allocated.

malloc/malloc.c of glibc 2.36 (the same in 2.31 to 2.41 as far as is modelled): one arena; small freed blocks are kept apart
and not joined with their neighbours (tcache, fastbins); others are joined, wait in the unsorted list, and are then found by
best fit; blocks above a threshold are mapped, and the threshold rises with each mapped block that is freed; only the end of
the heap is given back. All that was ever handed out below the heap's end counts as resident.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

_MIB = 2**20
_PAGE = 4096
_HEADER = 8
_LEAST = 32  # MINSIZE
_ALIGNMENT = 64  # torch and oneDNN ask for it
_FAST = 128  # up to this size freed blocks go to a fastbin
_TCACHE, _TCACHE_COUNT = 1040, 7
_SMALL = 1024  # below it a request takes a freed block of its own size only, or the rest of the last one split
_CONSOLIDATE = 64 * 1024  # a freed block so large empties the fastbins
_PAD = 128 * 1024  # what the heap grows by beside the request, and keeps at its end
_MOST_THRESHOLD = 32 * _MIB  # DEFAULT_MMAP_THRESHOLD_MAX


class Heap:
    """The main arena, empty. Addresses are numbers without meaning outside; `high_bytes` is the most that was resident.

    `mmap_threshold` is where it stands already: a process that has loaded torch has raised it.
    """

    def __init__(self, mmap_threshold: int) -> None:
        self.high_bytes = 0
        self._mmap_threshold, self._trim_threshold = mmap_threshold, 2 * mmap_threshold
        self._top = self._end = self._touched = 0
        self._size: dict[int, int] = {}  # of all blocks below the top
        self._free_ending: dict[int, int] = {}  # where a free block ends: where it begins
        self._free: set[int] = set()
        self._unsorted: deque[int] = deque()
        self._waiting: set[int] = set()  # those of the list that are still there
        self._sorted: list[tuple[int, int, int]] = []  # size, age, address
        self._keys: dict[int, tuple[int, int, int]] = {}
        self._age = 0
        self._last_split = -1
        self._tcache: dict[int, list[int]] = {}
        self._fast: dict[int, list[int]] = {}
        self._mapped: dict[int, int] = {}
        self._mapped_bytes, self._next_mapping = 0, 1 << 46

    @property
    def resident_bytes(self) -> int:
        """Touched and not given back."""
        return self._touched + self._mapped_bytes

    def allocate(self, size: int) -> int:
        """malloc: the new block's address."""
        need = _padded(size)
        kept = self._tcache.get(need) if need <= _TCACHE else None
        return kept.pop() if kept else self._take(need)

    def allocate_aligned(self, size: int) -> int:
        """posix_memalign: a larger block is taken, and what lies before and behind the aligned part is freed."""
        need = _padded(size)
        at = self._take(_padded(need + _ALIGNMENT + _LEAST))
        if at in self._mapped:
            return at
        if (at + 2 * _HEADER) % _ALIGNMENT:
            begin = -(-(at + 2 * _HEADER) // _ALIGNMENT) * _ALIGNMENT - 2 * _HEADER
            begin += _ALIGNMENT if begin - at < _LEAST else 0
            lead, self._size[at] = self._size[at], begin - at
            self._size[begin] = lead - (begin - at)
            self._put_back(at)
            at = begin
        rest = self._size[at] - need
        if rest > _LEAST:
            self._size[at], self._size[at + need] = need, rest
            self._put_back(at + need)
        return at

    def free(self, at: int) -> None:
        """free: of a block that was handed out and not freed since."""
        mapped = self._mapped.pop(at, None)
        if mapped is None:
            self._put_back(at)
            return
        self._mapped_bytes -= mapped
        if self._mmap_threshold < mapped <= _MOST_THRESHOLD:
            self._mmap_threshold, self._trim_threshold = mapped, 2 * mapped

    def _take(self, need: int) -> int:
        """_int_malloc of a block of `need` bytes, header included, or a mapping."""
        small = need < _SMALL
        if need <= _FAST and self._fast.get(need):
            at = self._fast[need].pop()
            self._stash(need, self._fast[need])
            return at
        if small:
            found = self._binned(need, exact=True)
            if found is not None:
                return found
        else:
            self._empty_fastbins()
        found = self._from_unsorted(need, small)
        if found is None:
            found = self._binned(need, exact=False)
            if found is not None:
                self._split(found, need, remember=small)
        if found is not None:
            return found
        if self._end - self._top < need + _LEAST:
            if any(self._fast.values()):
                self._empty_fastbins()
                return self._take(need)
            if need >= self._mmap_threshold:
                return self._map(need)
            self._end += -(-(need + _PAD + _LEAST - (self._end - self._top)) // _PAGE) * _PAGE
        at = self._top
        self._size[at] = need
        self._top += need
        self._touched = max(self._touched, self._top)
        self.high_bytes = max(self.high_bytes, self.resident_bytes)
        return at

    def _from_unsorted(self, need: int, small: bool) -> int | None:
        """A waiting block of just this size; the others are put into their bins."""
        cached = self._tcache.setdefault(need, []) if need <= _TCACHE else None
        while self._unsorted:
            at = self._unsorted.popleft()
            if at not in self._waiting:
                continue
            size = self._size[at]
            if small and at == self._last_split and len(self._waiting) == 1 and size > need + _LEAST:
                self._leave(at)
                self._split(at, need, remember=True)
                return at
            if size != need:
                self._waiting.discard(at)
                self._age += 1
                self._keys[at] = key = (size, self._age, at)
                insort(self._sorted, key)
                continue
            self._leave(at)
            if cached is None or len(cached) >= _TCACHE_COUNT:
                return at
            cached.append(at)
        return cached.pop() if cached else None

    def _binned(self, need: int, *, exact: bool) -> int | None:
        """The smallest block that suffices, the oldest of its size, out of its bin."""
        place = bisect_left(self._sorted, (need, 0, 0))
        if place == len(self._sorted) or (exact and self._sorted[place][0] != need):
            return None
        at = self._sorted[place][2]
        self._leave(at)
        return at

    def _split(self, at: int, need: int, *, remember: bool) -> None:
        """Cut a block that has left its list; the rest waits."""
        rest = self._size[at] - need
        if rest < _LEAST:
            return
        self._size[at], self._size[at + need] = need, rest
        self._wait(at + need)
        if remember:
            self._last_split = at + need

    def _stash(self, size: int, more: list[int]) -> None:
        """What else lies in the bin goes to the tcache."""
        kept = self._tcache.setdefault(size, [])
        while more and len(kept) < _TCACHE_COUNT:
            kept.append(more.pop())

    def _put_back(self, at: int) -> None:
        """_int_free."""
        size = self._size[at]
        if size <= _TCACHE:
            kept = self._tcache.setdefault(size, [])
            if len(kept) < _TCACHE_COUNT:
                kept.append(at)
                return
        if size <= _FAST:
            self._fast.setdefault(size, []).append(at)
            return
        if self._join(at) >= _CONSOLIDATE:
            self._empty_fastbins()
            spare = self._end - self._top - _LEAST - 1
            if spare >= self._trim_threshold:
                self._end -= (spare - _PAD) // _PAGE * _PAGE
                self._touched = min(self._touched, self._end)

    def _join(self, at: int) -> int:
        """Join a freed block with free neighbours, and the top where it reaches it; its size then."""
        size = self._size.pop(at)
        before = self._free_ending.get(at)
        if before is not None:
            self._leave(before)
            size += self._size.pop(before)
            at = before
        behind = at + size
        if behind == self._top:
            self._top = at
            return self._end - at
        if behind in self._free:
            self._leave(behind)
            size += self._size.pop(behind)
        self._size[at] = size
        self._wait(at)
        return size

    def _empty_fastbins(self) -> None:
        for blocks in self._fast.values():
            while blocks:
                self._join(blocks.pop())

    def _wait(self, at: int) -> None:
        self._free.add(at)
        self._free_ending[at + self._size[at]] = at
        self._waiting.add(at)
        self._unsorted.append(at)

    def _leave(self, at: int) -> None:
        """Out of the list that holds a free block."""
        self._free.discard(at)
        del self._free_ending[at + self._size[at]]
        if at in self._waiting:
            self._waiting.discard(at)
        else:
            self._sorted.pop(bisect_left(self._sorted, self._keys.pop(at)))

    def _map(self, need: int) -> int:
        at, size = self._next_mapping, -(-(need + _HEADER) // _PAGE) * _PAGE
        self._next_mapping += size
        self._mapped[at] = size
        self._mapped_bytes += size
        self.high_bytes = max(self.high_bytes, self.resident_bytes)
        return at


def _padded(size: int) -> int:
    return max(_LEAST, (size + _HEADER + 15) & ~15)
