"""Keeps the memory that a process has freed, for its next step. Called once, by the processes that train or measure training.

A step frees its activations from the last to the first. glibc gives the top of the heap back to the kernel as soon as more than
`M_TRIM_THRESHOLD` of it is free, and the next step touches every page for the first time again. Whether that happens depends on
what else lies on the heap: the same step may take half as long again in one process as in another.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_NEVER = -1
_MOST_MMAP_THRESHOLD_BYTES = 32 * 2**20  # glibc's DEFAULT_MMAP_THRESHOLD_MAX: what its own adjustment ends at


def keep_freed_memory() -> None:
    """From now on, what is freed stays with the process; only blocks above 32 MiB are mapped, and given back, each time.

    No effect where the C library has no `mallopt`, or does not know these words.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MOST_MMAP_THRESHOLD_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _NEVER)
