"""Memory that a process keeps once it has freed it."""

from __future__ import annotations

import subprocess
import sys

_TOUCHED = """
import resource
from trainwright.tasks.train.freed_memory import keep_freed_memory

keep_freed_memory()
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [bytearray(b"x") * (1 << 20) for _ in range(64)]
    del blocks
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults)
"""


def test_memory_that_was_freed_is_not_fetched_from_the_kernel_again() -> None:
    done = subprocess.run([sys.executable, "-c", _TOUCHED], capture_output=True, text=True, check=True)
    pages = (64 << 20) / 4096
    assert int(done.stdout) < pages / 100
