"""Work at low priority, which leaves the CPU to the training."""

from __future__ import annotations

import os
import threading

import pytest

from trainwright.tasks.train.worker.low_priority import NICE, at_low_priority


def own_niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_work_runs_at_low_priority_and_its_caller_keeps_its_own() -> None:
    before = own_niceness()
    assert at_low_priority(own_niceness) == max(before, NICE)
    assert own_niceness() == before


def test_the_caller_gets_the_works_error() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        at_low_priority(int, "none")
