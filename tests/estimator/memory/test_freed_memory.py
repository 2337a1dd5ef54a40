"""Freed memory that a process keeps, and the cost of fetching it again."""

from __future__ import annotations

import subprocess
import sys

import pytest

from trainwright.estimator.memory.freed_memory import MOST_HEAP_BLOCK_BYTES, first_touch_s_per_byte

_TOUCHED = """
import resource
from trainwright.estimator.memory.freed_memory import keep_freed_memory

keep_freed_memory(large_blocks={large_blocks})
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [bytearray(b"x") * {size} for _ in range({count})]
    del blocks
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults)
"""
_LARGE = 2 * MOST_HEAP_BLOCK_BYTES
_PLACED = """
import ctypes
from pathlib import Path

from trainwright.estimator.memory.freed_memory import keep_freed_memory, map_blocks

def on_heap(block):
    place = ctypes.addressof(ctypes.c_char.from_buffer(block))
    lines = Path("/proc/self/maps").read_text().splitlines()
    heap = next(line for line in lines if line.endswith("[heap]"))
    begin, end = (int(one, 16) for one in heap.split()[0].split("-"))
    return begin <= place < end

map_blocks()
first = bytearray(2**20)
keep_freed_memory()
second = bytearray(2**20)
print(on_heap(first), on_heap(second))
"""


@pytest.mark.parametrize(
    ("size", "count", "large_blocks", "kept"),
    [(2**20, 64, False, True), (_LARGE, 2, False, False), (_LARGE, 2, True, True)],
    ids=["small blocks", "large ones", "large ones, asked for"],
)
def test_freed_memory_stays_in_the_process(
    size: int, count: int, large_blocks: bool, kept: bool
) -> None:
    code = _TOUCHED.format(size=size, count=count, large_blocks=large_blocks)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    pages = size * count / 4096
    assert (int(done.stdout) < pages / 100) == kept


def test_blocks_are_mapped_until_freed_memory_is_kept() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PLACED], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "True"]


def test_the_first_touch_of_memory_costs_time() -> None:
    assert first_touch_s_per_byte() > 0
