"""The peak memory that a rank reports is its own, not that of the process that started it."""

from __future__ import annotations

import subprocess
import sys

_LARGE = 300 * 2**20
_REPORT = (
    "from trainwright.tasks.train.channel import usage_of_this_process as used;"
    "print(used()['peak_memory_bytes'])"
)


def test_memory_of_the_starting_process_does_not_count() -> None:
    held = b"\1" * _LARGE
    done = subprocess.run([sys.executable, "-c", _REPORT], capture_output=True, check=True)
    assert 2**20 < float(done.stdout) < len(held)
