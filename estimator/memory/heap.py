"""A model of the heap as glibc's malloc manages it: which bytes stay resident. Arithmetic on sizes.

What matters in malloc/malloc.c (2.36):
- malloc takes the smallest hole that is large enough; the remainder is a hole.
- A request that fits no hole extends the heap. From a threshold on, it is a separate mapping, which
  is returned when it is freed. The threshold rises to the size of each returned mapping, up to 32
  MiB; a free end of the heap of more than twice the threshold is returned too.
- Adjacent holes become one. But a small chunk that is freed is kept for the next request of its
  size (tcache: seven of each size), and meanwhile its neighbours stay separate.
- torch requests blocks at multiples of 64 bytes. malloc takes a chunk larger by 112 bytes and frees
  both ends, which are small. So a freed block has room for the next block of its size only if
  nothing is allocated in these ends.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict

from trainwright.estimator.memory.freed_memory import MOST_HEAP_BLOCK_BYTES

_ALIGNMENT, _LEAST_CHUNK, _HEADER, _PAGE = 64, 32, 8, 4096
# Memalign's request in addition to the chunk; this request is rounded up once more.
_SPARE = _ALIGNMENT + _LEAST_CHUNK + 16
_MOST_KEPT_BYTES, _KEPT = 1040, 7  # tcache: largest size of its chunks, and the number of each size
_FIRST_THRESHOLD = 1_700_000  # 128 KiB where a process starts; importing torch raises it
_PAD = 128 * 2**10  # M_TOP_PAD
# Holes in the heap of a process that has loaded torch (malloc_info): size -> count.
_HOLES = {
    48: 80,
    112: 60,
    224: 40,
    336: 50,
    432: 40,
    512: 35,
    896: 20,
    1280: 8,
    2_304: 5,
    4_112: 2,
    19_888: 1,
    24_720: 2,
    30_656: 1,
    38_096: 1,
    46_640: 1,
    74_288: 2,
    102_112: 3,
    214_816: 1,
}

Chunk = tuple[int, int]
"""Place and size; a negative place means a mapping."""
_MAPPED = -1


class Heap:
    """The main arena of a process that has loaded torch.

    `high_bytes` is its maximum size since then.
    """

    def __init__(self) -> None:
        self.high_bytes = 0
        self._mapped, self._threshold = 0, _FIRST_THRESHOLD
        self._sizes: list[Chunk] = []  # of holes: (size, place), ascending
        self._starts: dict[int, int] = {}  # of holes: place -> size
        self._ends: dict[int, int] = {}  # of holes: end -> place
        self._kept: defaultdict[int, list[int]] = defaultdict(list)  # size -> places
        place = 0
        for size, count in _HOLES.items():
            for _ in range(count):
                self._add(place, size)
                place += size + _LEAST_CHUNK
        # The free end begins at _top, the heap ends at _end; all before _touched is resident.
        self._begin = self._top = self._end = self._touched = place

    def malloc(self, size: float) -> Chunk:
        """Allocate a chunk for this many bytes."""
        return self.take(chunk_bytes(size))

    def take(self, chunk: int) -> Chunk:
        """Allocate a chunk of exactly this size (`chunk_bytes`)."""
        kept = self._kept[chunk] if chunk <= _MOST_KEPT_BYTES else None
        if kept:
            return kept.pop(), chunk
        place, found = self._hole_or_new(chunk)
        if kept is not None and found == chunk:
            self._keep(kept, chunk)
        if place >= 0:
            if found - chunk >= _LEAST_CHUNK:
                self._release(place + chunk, found - chunk)
                found = chunk
            self._touch(place + found)
        return place, found

    def memalign(self, size: float) -> Chunk:
        """Allocate the chunk of a block of torch; its ends are freed."""
        chunk = chunk_bytes(size)
        place, found = self._hole_or_new(chunk + _SPARE)
        if place < 0:
            return place, found
        rest = found - chunk - _SPARE
        if rest >= _LEAST_CHUNK:
            self._release(place + chunk + _SPARE, rest)
            found -= rest
        lead = -(place + 2 * _HEADER) % _ALIGNMENT
        if 0 < lead < _LEAST_CHUNK:
            lead += _ALIGNMENT
        if lead:
            self.free((place, lead))
        place, found = place + lead, found - lead
        if found - chunk > _LEAST_CHUNK:
            self.free((place + chunk, found - chunk))
            found = chunk
        self._touch(place + found)
        return place, found

    def free(self, chunk: Chunk) -> None:
        """Free a chunk."""
        place, size = chunk
        if place < 0:
            self._mapped -= size
            if self._threshold < size <= MOST_HEAP_BLOCK_BYTES:
                self._threshold = size
            return
        if size <= _MOST_KEPT_BYTES:
            kept = self._kept[size]
            if len(kept) < _KEPT:
                kept.append(place)
                return
        self._release(place, size)

    def _hole_or_new(self, size: int) -> Chunk:
        """A hole of at least this size, or new memory of this size."""
        at = bisect_left(self._sizes, (size, -1))
        if at < len(self._sizes):
            found, place = self._sizes.pop(at)
            del self._starts[place], self._ends[place + found]
            return place, found
        if self._end - self._top < size + _LEAST_CHUNK:
            if size >= self._threshold:
                pages = (size + _HEADER + _PAGE - 1) & -_PAGE
                self._mapped += pages
                self._note()
                return _MAPPED, pages
            self._end = (self._top + size + _PAD + _LEAST_CHUNK + _PAGE - 1) & -_PAGE
        place = self._top
        self._top += size
        return place, size

    def _keep(self, kept: list[int], size: int) -> None:
        """Put other holes of a size into the tcache when one of exactly this size was taken."""
        at = bisect_left(self._sizes, (size, -1))
        while len(kept) < _KEPT and at < len(self._sizes) and self._sizes[at][0] == size:
            place = self._sizes[at][1]
            self._remove(place)
            kept.append(place)

    def _release(self, place: int, size: int) -> None:
        """Make a hole and merge it with free neighbours."""
        before = self._ends.get(place)
        if before is not None:
            size += self._remove(before)
            place = before
        if place + size in self._starts:
            size += self._remove(place + size)
        if place + size != self._top:
            self._add(place, size)
            return
        self._top = place
        if self._end - place >= 2 * self._threshold:
            self._end = (place + _LEAST_CHUNK + _PAD + _PAGE) & -_PAGE
            self._touched = min(self._touched, self._end)

    def _add(self, place: int, size: int) -> None:
        self._starts[place], self._ends[place + size] = size, place
        insort(self._sizes, (size, place))

    def _remove(self, place: int) -> int:
        size = self._starts.pop(place)
        del self._ends[place + size], self._sizes[bisect_left(self._sizes, (size, place))]
        return size

    def _touch(self, end: int) -> None:
        if end > self._touched:
            self._touched = end
            self._note()

    def _note(self) -> None:
        self.high_bytes = max(self.high_bytes, self._touched - self._begin + self._mapped)


def chunk_bytes(size: float) -> int:
    """The size of malloc's chunk for this many bytes."""
    return max(_LEAST_CHUNK, (int(size) + _HEADER + 15) & ~15)
