"""Work that is to leave the CPU to the training beside it. Loads no torch."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

NICE = 10
"""Linux gives a thread of this niceness about a tenth of a core that another wants, and all of one that is idle."""
T = TypeVar("T")


def standing_back(do: Callable[..., T], *arguments: object) -> T:
    """What `do` returns or raises, from a thread of low priority.

    The caller keeps its own: a process that has lowered its priority can't raise it again without the right to.
    """
    with ThreadPoolExecutor(1, initializer=_step_back) as beside:
        return beside.submit(do, *arguments).result()


def _step_back() -> None:
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, max(NICE, os.getpriority(os.PRIO_PROCESS, thread)))
