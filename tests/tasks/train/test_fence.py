"""A holder that was only asleep does no harm to the checkpoints of its successor, in any store."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from train.training_case import request, when_checkpoint

from trainwright.tasks.errors import RunHeld
from trainwright.tasks.objects import FolderStore, ObjectStore, open_store
from trainwright.tasks.train import checkpoint, fence, train


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "s3":
        request.getfixturevalue("s3")
        return open_store(f"s3://fences/{tmp_path.name}")
    return FolderStore(tmp_path)


def objects(step: int, token: int) -> dict[str, bytes]:
    where = f"checkpoints/step-{step:08d}"
    state = json.dumps({"step": step, "token": token}).encode()
    return {f"{where}/model.safetensors": f"of {token}".encode(), f"{where}/state.json": state}


def counting(store: ObjectStore) -> list[tuple[int, int]]:
    keys = [item.key for item in store.list("checkpoints/step-") if item.key.endswith("state.json")]
    states: list[Any] = [SimpleNamespace(**json.loads(store.get(key))) for key in keys]
    return [(one.step, one.token) for one in fence.standing(store, states)]


class Overtaken:
    """A store in which, before the first object is replaced, a later holder enters and writes."""

    def __init__(self, store: ObjectStore, overtake: Any) -> None:
        self._store, self._overtake = store, overtake

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def swap(self, key: str, data: bytes, etag: str | None) -> bool:
        overtake, self._overtake = self._overtake, lambda: None
        overtake()
        return self._store.swap(key, data, etag)


def test_a_holder_writes_and_its_successor_goes_on_over_it(store: ObjectStore) -> None:
    fence.enter(store, 5, 0)
    fence.put(store, 5, objects(10, 5))
    fence.put(store, 5, objects(20, 5))
    fence.enter(store, 7, 10)
    assert counting(store) == [(10, 5)]
    fence.put(store, 7, objects(20, 7))
    assert counting(store) == [(10, 5), (20, 7)]
    assert store.get("checkpoints/step-00000020/model.safetensors") == b"of 7"


def test_an_older_holder_is_refused_where_it_asks(store: ObjectStore) -> None:
    fence.enter(store, 7, 0)
    for stale in (lambda: fence.enter(store, 5, 0), lambda: fence.put(store, 5, objects(10, 5))):
        with pytest.raises(RunHeld, match="later lease"):
            stale()
    assert counting(store) == []


@pytest.mark.parametrize("there", [None, 5])
def test_one_stopped_between_its_look_and_its_write_replaces_nothing(store: ObjectStore, there: int | None) -> None:
    fence.enter(store, 5, 0)
    if there is not None:
        fence.put(store, there, objects(10, there))

    def overtake() -> None:
        fence.enter(store, 7, 0)
        fence.put(store, 7, objects(10, 7))

    with pytest.raises(RunHeld, match="later lease"):
        fence.put(Overtaken(store, overtake), 5, objects(10, 5))  # type: ignore[arg-type]
    assert counting(store) == [(10, 7)]
    assert store.get("checkpoints/step-00000010/model.safetensors") == b"of 7"


def test_a_late_write_where_nothing_lies_yet_does_not_count_and_is_written_over(store: ObjectStore) -> None:
    fence.enter(store, 5, 0)
    fence.put(Overtaken(store, lambda: fence.enter(store, 7, 0)), 5, objects(10, 5))  # type: ignore[arg-type]
    assert counting(store) == []
    fence.put(store, 7, objects(10, 7))
    assert counting(store) == [(10, 7)]


def test_the_rightful_holder_is_not_stopped_by_a_late_write_that_comes_between(store: ObjectStore) -> None:
    fence.enter(store, 5, 0)
    fence.enter(store, 7, 0)
    late = objects(10, 5)

    def wake() -> None:
        for key, data in late.items():
            store.put(key, data)

    fence.put(Overtaken(store, wake), 7, objects(10, 7))  # type: ignore[arg-type]
    assert counting(store) == [(10, 7)]


def test_without_a_lease_nothing_is_fenced(store: ObjectStore) -> None:
    fence.enter(store, 0, 0)
    fence.put(store, 0, objects(10, 0))
    assert counting(store) == [(10, 0)]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 50)), max_size=6), st.integers(0, 9), st.integers(0, 60))
def test_a_checkpoint_counts_unless_a_later_holder_went_on_from_before_it(
    entered: list[tuple[int, int]], token: int, step: int
) -> None:
    class Listed:
        def list(self, prefix: str) -> list[Any]:
            return [SimpleNamespace(key=f"checkpoints/lease-{t:010d}-from-{s:08d}") for t, s in dict(entered).items()]

    state = SimpleNamespace(step=step, token=token)
    found = fence.standing(Listed(), [state])  # type: ignore[arg-type]
    assert bool(found) == (not any(t > token and s < step for t, s in dict(entered).items()))


def test_a_training_that_another_lease_has_followed_ends_with_the_next_checkpoint(tmp_path: Path) -> None:
    asked = request(tmp_path, [32], epochs=30).model_copy(update={"token": 5})
    follow = when_checkpoint(tmp_path, 5, lambda: fence.enter(asked.store(), 7, 5))
    with pytest.raises(RunHeld, match="a later lease"):
        train(asked)
    follow.join()
    assert [state.step for state in checkpoint.list_states(asked.store())] == [5]
    with pytest.raises(RunHeld, match="a later lease"):
        train(asked)
    spec = asked.job.train.model_copy(update={"epochs": 1})
    again = asked.model_copy(update={"token": 9, "job": asked.job.model_copy(update={"train": spec})})
    assert train(again).state == "success"
    assert {state.token for state in checkpoint.list_states(asked.store())} <= {5, 9}
