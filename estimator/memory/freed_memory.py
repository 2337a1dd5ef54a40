"""Keeps the memory that a process has freed, for its next step; what memory costs that was given back.

A step frees its activations from the last to the first. glibc gives the top of the heap back to the kernel as soon as more than
`M_TRIM_THRESHOLD` of it is free, and the next step touches every page for the first time again. Whether that happens depends on
what else lies on the heap: the same step may take half as long again in one process as in another. Blocks from
`MOST_HEAP_BLOCK_BYTES` on are mapped, and given back, each time.

What stays for the whole training (parameters, the optimizer's state) is made before the end of the first step. Where it lies on
the heap, what comes and goes finds no room beside it: a process may hold twice what it needs. So until then blocks are mapped.
"""

from __future__ import annotations

import ctypes
import mmap
import statistics
import time

MOST_HEAP_BLOCK_BYTES = 32 * 2**20
"""glibc's DEFAULT_MMAP_THRESHOLD_MAX: what its own adjustment ends at."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # malloc.h
_NEVER = -1
_LEAST_MAPPED_BYTES = 256 * 2**10
_TOUCHED_BYTES, _READINGS = 16 * 2**20, 9


def map_blocks() -> None:
    """From now on, until `keep_freed_memory`, blocks are mapped, each by itself, and given back.

    No effect where the C library has no `mallopt`, or does not know these words.
    """
    _tell_malloc((_M_MMAP_THRESHOLD, _LEAST_MAPPED_BYTES), (_M_TRIM_THRESHOLD, _NEVER))


def keep_freed_memory(*, large_blocks: bool = False) -> None:
    """From now on, what is freed stays with the process; `large_blocks`: those too that are mapped else.

    No effect where the C library has no `mallopt`, or does not know these words.
    """
    _tell_malloc((_M_MMAP_THRESHOLD, MOST_HEAP_BLOCK_BYTES), (_M_TRIM_THRESHOLD, _NEVER))
    if large_blocks:
        _tell_malloc((_M_MMAP_MAX, 0))


def _tell_malloc(*settings: tuple[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for name, value in settings:
            mallopt(name, value)


def first_touch_s_per_byte() -> float:
    """Seconds for each byte that is mapped, touched for the first time and given back, beyond those of touching it again.

    Of the thread's own time: what else runs adds nothing.
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
