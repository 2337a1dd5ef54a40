"""The laws of bounded work, of the cache, and of the checks before parsing."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.tasks.errors import BadInput
from trainwright.tasks.service.compute.bounded_work import BoundedWork, Cache, content_key
from trainwright.tasks.service.limits import MAX_DEPTH, TooBusy, parse, too_deep

_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(-1e20, 1e20)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=4)
    ),
    max_leaves=20,
)


def _depth(value: Any) -> int:
    inner = (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    )
    return 0 if inner is None else 1 + max(map(_depth, inner), default=0)


@given(st.dictionaries(st.text(st.characters(codec="utf-8")), _VALUES))
def test_every_json_value_survives_a_round_trip(value: dict[str, Any]) -> None:
    assert parse(json.dumps(value).encode()) == value


@given(_VALUES, st.integers(0, 2 * MAX_DEPTH))
def test_brackets_inside_texts_do_not_count_as_depth(value: Any, levels: int) -> None:
    for level in range(levels):
        value = [value] if level % 2 else {'"]}\\': value}
    assert too_deep(json.dumps(value).encode()) == (_depth(value) > MAX_DEPTH)


@given(st.binary(max_size=200))
def test_any_bytes_are_parsed_or_refused_as_bad_input(body: bytes) -> None:
    with contextlib.suppress(BadInput):
        assert isinstance(parse(body), dict)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 60)), max_size=60))
def test_the_cache_keeps_its_bound_and_returns_the_latest_value(
    puts: list[tuple[int, int]],
) -> None:
    cache, last = Cache(100), dict[str, bytes]()
    for number, (key, size) in enumerate(puts):
        answer = bytes([number % 256]) * size
        cache.put(str(key), answer, 1e9)
        last[str(key)] = answer
        assert cache.size_bytes <= 100
        assert cache.get(str(key)) == answer
    assert all(cache.get(key) in (None, answer) for key, answer in last.items())


def test_answers_expire_and_the_least_recently_used_is_dropped_first() -> None:
    now = [0.0]
    cache = Cache(2, lambda: now[0])
    cache.put("a", b"1", 10)
    cache.put("b", b"2", 5)
    assert cache.get("a") == b"1"
    cache.put("c", b"3", 10)
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == (b"1", None, b"3")
    now[0] = 10.0
    assert cache.get("a") is None
    cache.put("large", b"123", 10)
    assert cache.get("large") is None


@given(st.lists(st.text(), max_size=3), st.lists(st.text(), max_size=3))
def test_keys_are_equal_only_for_equal_parts(one: list[str], two: list[str]) -> None:
    def key(parts: list[str]) -> str:
        return content_key(*(part.encode("utf-8", "surrogatepass") for part in parts))

    assert (key(one) == key(two)) == (one == two)


def test_equal_work_is_done_once_and_other_work_is_bounded() -> None:
    async def scenario() -> None:
        work, gate, begun = BoundedWork(1, 1), asyncio.Event(), list[str]()

        async def slow(name: str) -> bytes:
            begun.append(name)
            await gate.wait()
            return name.encode()

        same = [asyncio.create_task(work.do("a", lambda: slow("a"))) for _ in range(5)]
        other = asyncio.create_task(work.do("b", lambda: slow("b")))
        while not begun:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)
        assert begun == ["a"]
        with pytest.raises(TooBusy):
            await work.do("c", lambda: slow("c"))
        gate.set()
        assert await asyncio.gather(*same) == [b"a"] * 5
        assert await other == b"b"
        assert await work.do("c", lambda: slow("c")) == b"c"

    asyncio.run(scenario())


def test_work_is_cancelled_when_its_last_caller_has_gone() -> None:
    async def scenario() -> None:
        work, begun, ended = BoundedWork(1, 0), list[str](), list[str]()

        async def endless() -> bytes:
            begun.append("a")
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                ended.append("cancelled")
                raise
            return b""

        first, second = (asyncio.create_task(work.do("a", endless)) for _ in range(2))
        while not begun:
            await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.wait([first])
        await asyncio.sleep(0.01)
        assert ended == []
        second.cancel()
        while not ended:
            await asyncio.sleep(0.01)
        await asyncio.wait([second])
        assert ended == ["cancelled"]

        async def quick() -> bytes:
            return b"free"

        assert await work.do("b", quick) == b"free"

    asyncio.run(scenario())


def test_an_error_reaches_all_callers_and_is_not_cached() -> None:
    async def scenario() -> None:
        work, times = BoundedWork(1, 0), [0]

        async def failing() -> bytes:
            times[0] += 1
            await asyncio.sleep(0)
            raise BadInput("no")

        found = await asyncio.gather(
            *(work.do("a", failing) for _ in range(3)), return_exceptions=True
        )
        assert all(isinstance(one, BadInput) for one in found)
        assert times == [1]
        with pytest.raises(BadInput):
            await work.do("a", failing)
        assert times == [2]

    asyncio.run(scenario())
