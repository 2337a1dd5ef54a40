"""The laws of the model of glibc's heap, and that it does as glibc does."""

from __future__ import annotations

import json
import platform
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.estimator.heap import Heap

_MIB = 2**20
_SIZES = st.one_of(st.integers(1, 2000), st.integers(2000, 50 * _MIB))


@st.composite
def _requests(draw: st.DrawFn) -> list[tuple[bool, int, int]]:
    """Aligned or not, bytes, and after how many more requests it is freed."""
    return draw(st.lists(st.tuples(st.booleans(), _SIZES, st.integers(0, 20)), max_size=60))


@given(_requests())
def test_blocks_never_overlap_and_all_of_them_are_resident(requests: list[tuple[bool, int, int]]) -> None:
    heap = Heap(2 * _MIB)
    held: dict[int, tuple[int, int]] = {}
    for turn, (aligned, size, stays) in enumerate(requests):
        for at in [at for at, (_, until) in held.items() if until <= turn]:
            heap.free(at)
            del held[at]
        at = heap.allocate_aligned(size) if aligned else heap.allocate(size)
        assert all(at + size <= other or other + length <= at for other, (length, _) in held.items())
        held[at] = (size, turn + stays + 1)
        assert heap.high_bytes >= heap.resident_bytes >= sum(length for length, _ in held.values())
    for at in held:
        heap.free(at)
    assert heap.resident_bytes <= heap.high_bytes


def test_a_large_block_that_is_freed_is_given_back() -> None:
    heap = Heap(2 * _MIB)
    heap.free(heap.allocate(64 * _MIB))
    assert heap.resident_bytes == 0
    assert heap.high_bytes >= 64 * _MIB


def test_after_a_mapping_is_freed_blocks_of_its_size_come_from_the_heap_and_stay() -> None:
    heap = Heap(2 * _MIB)
    heap.free(heap.allocate(8 * _MIB))
    assert heap.resident_bytes == 0
    below, above = heap.allocate(8 * _MIB), heap.allocate(2000)
    heap.free(below)
    assert heap.resident_bytes >= 8 * _MIB
    assert heap.allocate(8 * _MIB) == below
    heap.free(above)


_PLACED = """
import ctypes, json, random
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p; libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]; libc.free.restype = None
libc.malloc_trim(0)
kept = [libc.malloc(size) for size in range(1100, 300_000, 700)]  # what was free before is taken
first = [libc.malloc(300_000 + 64 * place) for place in range(40)]
begin = first[0]
for place in (3, 7, 8, 9, 20, 31):
    libc.free(first[place])
print(json.dumps([libc.malloc(size) - begin for size in (250_000, 300_000, 700_000, 40_000)]))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the model is of glibc")
def test_freed_blocks_are_taken_again_where_glibc_takes_them() -> None:
    environment = {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=33554432"}
    done = subprocess.run([sys.executable, "-c", _PLACED], check=True, capture_output=True, text=True, env=environment)
    heap = Heap(32 * _MIB)
    first = [heap.allocate(300_000 + 64 * place) for place in range(40)]
    for place in (3, 7, 8, 9, 20, 31):
        heap.free(first[place])
    assert [heap.allocate(size) - first[0] for size in (250_000, 300_000, 700_000, 40_000)] == json.loads(done.stdout)


def test_an_aligned_block_that_is_freed_does_not_fit_the_same_request_once_its_edges_are_taken() -> None:
    heap = Heap(2 * _MIB)
    block = heap.allocate_aligned(_MIB)
    heap.allocate(3000)  # keeps it off the heap's end
    for _ in range(3):
        heap.allocate(24)  # takes what the alignment left
    heap.free(block)
    assert heap.allocate_aligned(_MIB) != block
