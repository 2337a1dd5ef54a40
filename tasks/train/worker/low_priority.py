"""Work that leaves the CPU to the training beside it. Loads no torch."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

NICE = 10
"""Linux gives a thread of this niceness about a tenth of a core that another thread wants, and all
of an idle one."""
T = TypeVar("T")


def at_low_priority(work: Callable[..., T], *arguments: object) -> T:
    """What `work` returns or raises, done by a thread of low priority.

    The calling thread keeps its own: without the right to, a thread that has lowered its priority
    can't raise it again.
    """
    with ThreadPoolExecutor(1, initializer=_lower_priority) as executor:
        return executor.submit(work, *arguments).result()


def _lower_priority() -> None:
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, max(NICE, os.getpriority(os.PRIO_PROCESS, thread)))
