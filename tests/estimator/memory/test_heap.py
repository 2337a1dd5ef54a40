"""The model of glibc's heap: what chunks keep resident."""

from __future__ import annotations

import itertools
import json
import platform
import random
import statistics
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.estimator.memory.heap import Chunk, Heap

_MIB = 2**20
_PLANS = st.lists(
    st.tuples(
        st.sampled_from(("block", "small", "free")), st.integers(1, 64 * _MIB), st.integers(0, 30)
    ),
    max_size=80,
)


@given(_PLANS)
def test_chunks_never_overlap_and_live_bytes_are_resident(
    plan: list[tuple[str, int, int]],
) -> None:
    heap, alive = Heap(), list[tuple[Chunk, int]]()
    for what, size, place in plan:
        if what == "free" and alive:
            heap.free(alive.pop(place % len(alive))[0])
        elif what == "small":
            alive.append((heap.malloc(size % 1000), size % 1000))
        elif what == "block":
            chunk = heap.memalign(size)
            assert chunk[0] < 0 or (chunk[0] + 16) % 64 == 0
            alive.append((chunk, size))
        assert all(chunk[1] >= size for chunk, size in alive)
        placed = sorted(chunk for chunk, _ in alive if chunk[0] >= 0)
        assert all(
            start + length <= after for (start, length), (after, _) in itertools.pairwise(placed)
        )
        large = sum(size for chunk, size in alive if size > _MIB)
        assert heap.high_bytes >= large - _MIB  # up to this much fits into earlier holes


def test_a_freed_blocks_room_is_reused_once_its_ends_leave_the_tcache() -> None:
    heap = Heap()
    for _ in range(40):
        heap.free(heap.memalign(_MIB))
    assert (
        8 * _MIB < heap.high_bytes < 8.1 * _MIB
    )  # after seven of each size; malloc itself takes 8.00 MiB


def test_small_objects_in_the_ends_of_blocks_prevent_their_reuse() -> None:
    def most(small: int) -> float:
        heap, draw = Heap(), random.Random(0)
        for _ in range(60):
            blocks = [heap.memalign(_MIB) for _ in range(10)]
            kept = [heap.malloc(draw.choice((24, 56, 88))) for _ in range(small)]
            for block in blocks:
                heap.free(block)
            for one in kept[::2]:
                heap.free(one)
        return float(heap.high_bytes)

    assert most(40) > 1.2 * most(0)


@pytest.mark.parametrize("size", [40 * _MIB, 64 * _MIB])
def test_large_blocks_are_returned(size: int) -> None:
    heap = Heap()
    for _ in range(5):
        heap.free(heap.memalign(size))
    assert heap.high_bytes < size + _MIB


def test_after_a_mapping_is_freed_its_size_is_allocated_on_the_heap() -> None:
    heap = Heap()
    first = heap.memalign(8 * _MIB)
    assert first[0] < 0
    heap.free(first)
    assert heap.memalign(8 * _MIB)[0] >= 0


def test_a_free_end_of_the_heap_is_returned() -> None:
    heap = Heap()
    blocks = [heap.malloc(_MIB) for _ in range(20)]
    for block in reversed(blocks):
        heap.free(block)
    assert 20 * _MIB <= heap.high_bytes < 21 * _MIB
    heap.malloc(40 * _MIB)
    assert 40 * _MIB <= heap.high_bytes < 42 * _MIB


_REAL = """
import ctypes, json, sys
libc = ctypes.CDLL(None)
for name in ("malloc", "memalign", "sbrk"):
    getattr(libc, name).restype = ctypes.c_void_p
def end(): return libc.sbrk(ctypes.c_ssize_t(0))
# Raise the threshold as high as importing torch does.
libc.free(ctypes.c_void_p(libc.malloc(ctypes.c_size_t(1_690_000))))
begin, mapped, high, alive = end(), 0, 0, {}
for number, what, size in json.load(sys.stdin):
    if what == "free":
        place, length = alive.pop(number)
        mapped -= length
        libc.free(ctypes.c_void_p(place))
    else:
        size = ctypes.c_size_t(size)
        place = libc.memalign(ctypes.c_size_t(64), size) if what == "block" else libc.malloc(size)
        alive[number] = place, size.value if place > end() else 0
        mapped += alive[number][1]
    high = max(high, end() - begin + mapped)
print(high)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is a model of glibc's malloc")
@pytest.mark.parametrize("seed", range(4))
def test_the_model_takes_about_as_much_memory_as_malloc(seed: int) -> None:
    draw, alive = random.Random(seed), list[int]()
    plan: list[tuple[int, str, int]] = []
    for number in range(3000):
        what = draw.choice(("block", "small", "small", "free", "free", "free"))
        if what != "free":
            plan.append(
                (
                    number,
                    what,
                    draw.choice((1, 2, 3)) * 400_000 if what == "block" else draw.randint(8, 400),
                )
            )
            alive.append(number)
        elif alive:
            plan.append((alive.pop(draw.randrange(len(alive))), "free", 0))
    heap, chunks = Heap(), dict[int, Chunk]()
    for number, what, size in plan:
        if what == "free":
            heap.free(chunks.pop(number))
        else:
            chunks[number] = heap.memalign(size) if what == "block" else heap.malloc(size)
    command = [sys.executable, "-I", "-S", "-c", _REAL]
    real = statistics.median(  # where the kernel puts the heap is random
        int(
            subprocess.run(  # without thresholds from the environment
                command, input=json.dumps(plan), capture_output=True, text=True, check=True, env={}
            ).stdout
        )
        for _ in range(3)
    )
    assert heap.high_bytes == pytest.approx(real, rel=0.2)
