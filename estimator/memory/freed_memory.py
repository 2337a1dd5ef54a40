"""Makes malloc keep freed memory for the next step; measures the cost of memory it returns.

A step frees its activations from last to first. glibc returns the top of the heap to the kernel as
soon as more than `M_TRIM_THRESHOLD` of it is free, and the next step then has to fault in every
page again. Whether that happens depends on what else is on the heap: the same step may take 1.5
times as long in one process as in another. Blocks of `MOST_HEAP_BLOCK_BYTES` or more are mapped and
returned each time.

Everything that stays for the whole training (parameters, the optimizer's state) is allocated before
the end of the first step. On the heap, it would leave no room for temporary blocks in between, and
a process might hold twice the memory that it needs. So until then blocks are mapped.
"""

from __future__ import annotations

import ctypes
import mmap
import statistics
import time

MOST_HEAP_BLOCK_BYTES = 32 * 2**20
"""glibc's DEFAULT_MMAP_THRESHOLD_MAX: the upper end of its own adjustment."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # malloc.h
_NEVER = -1
_LEAST_MAPPED_BYTES = 256 * 2**10
_TOUCHED_BYTES, _READINGS = 16 * 2**20, 9


def map_blocks() -> None:
    """Map each block by itself and return it when it is freed, until `keep_freed_memory`.

    No effect if the C library has no `mallopt` or does not know these parameters.
    """
    _mallopt((_M_MMAP_THRESHOLD, _LEAST_MAPPED_BYTES), (_M_TRIM_THRESHOLD, _NEVER))


def keep_freed_memory(*, large_blocks: bool = False) -> None:
    """Keep freed memory in the process; with `large_blocks` also blocks that would be mapped.

    No effect if the C library has no `mallopt` or does not know these parameters.
    """
    _mallopt((_M_MMAP_THRESHOLD, MOST_HEAP_BLOCK_BYTES), (_M_TRIM_THRESHOLD, _NEVER))
    if large_blocks:
        _mallopt((_M_MMAP_MAX, 0))


def _mallopt(*settings: tuple[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for name, value in settings:
            mallopt(name, value)


def first_touch_s_per_byte() -> float:
    """Seconds per byte to map, first touch and return memory, minus those to touch it again.

    Measured as the thread's CPU time, which other programs hardly affect.
    """
    seen = []
    for _ in range(_READINGS):
        started = time.thread_time()
        mapped = mmap.mmap(-1, _TOUCHED_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        place = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        ctypes.memset(place, 1, _TOUCHED_BYTES)
        touched = time.thread_time()
        ctypes.memset(place, 2, _TOUCHED_BYTES)
        again = time.thread_time()
        mapped.close()
        seen.append((touched - started) - (again - touched) + (time.thread_time() - again))
    return max(0.0, statistics.median(seen)) / _TOUCHED_BYTES
