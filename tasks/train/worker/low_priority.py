"""Runs work at low priority, so that the training keeps the CPU. Loads no torch."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

NICE = 10
"""A thread of this niceness gets about a tenth of a core that another thread uses, and all of an
idle core."""
T = TypeVar("T")


def at_low_priority(work: Callable[..., T], *arguments: object) -> T:
    """Run `work` in a thread of low priority; what it returns or raises.

    Only a separate thread will do: without privileges, a thread can't raise its priority again.
    """
    with ThreadPoolExecutor(1, initializer=_lower_priority) as executor:
        return executor.submit(work, *arguments).result()


def _lower_priority() -> None:
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, max(NICE, os.getpriority(os.PRIO_PROCESS, thread)))
