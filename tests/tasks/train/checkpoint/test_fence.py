"""The index of checkpoints: which ones count, which launch may add some, which are retained."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import doors
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

from trainwright.infra.s3_server import S3Access
from trainwright.tasks.errors import CorruptArtefact, RunHeld
from trainwright.tasks.spec.job import Job
from trainwright.tasks.spec.train_spec import CheckpointPolicy
from trainwright.tasks.storage.connect import open_store
from trainwright.tasks.storage.folder import FolderStore
from trainwright.tasks.storage.objects import ObjectInfo, ObjectStore, sha256
from trainwright.tasks.train.checkpoint import fence, files


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    """An empty run folder in a store of each kind."""
    if request.param == "folder":
        return open_store((tmp_path / "run").as_uri(), doors.settings())
    request.getfixturevalue("s3")
    return open_store(f"s3://fenced/{sha256(str(tmp_path).encode())[:16]}", doors.settings())


def write(
    right: fence.Fence, step: int, content: bytes = b"weights", **fields: object
) -> files.CheckpointState:
    """Write a checkpoint with one file of this content."""
    state = files.CheckpointState(step=step, epoch=0, split=[1], owner=right.owner, **fields)  # type: ignore[arg-type]
    right.put(f"{fence.folder_name(step)}/model.safetensors", content)
    state.sha256, state.size_bytes = (
        {"model.safetensors": sha256(content)},
        {"model.safetensors": len(content)},
    )
    files.write_state(right, state, CheckpointPolicy(keep_last=3))
    return state


@pytest.mark.parametrize(
    "name", ["../../../etc/passwd", "model.pkl", "model-1-of-2.safetensors", "a/model.safetensors"]
)
def test_a_state_that_lists_an_unknown_file_is_skipped(tmp_path: Path, name: str) -> None:
    store = FolderStore(tmp_path / "run")
    right = fence.claim(store, None)
    write(right, 1)
    bad = files.CheckpointState(step=2, epoch=0, split=[1], sha256={name: sha256(b"weights")})
    files.write_state(right, bad, CheckpointPolicy())
    found = files.fetch_latest(store, tmp_path / "here")
    assert found is not None
    assert found.step == 1


def test_a_file_of_another_size_is_refused_before_it_is_read(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "run")
    state = write(fence.claim(store, None), 1, b"weights")
    (tmp_path / "run/checkpoints/step-00000001/model.safetensors").write_bytes(b"weights and more")
    with pytest.raises(CorruptArtefact, match="16 bytes; 7 were written"):
        files.whole_model(store, state)


def test_every_store_accepts_a_memoryview(store: ObjectStore) -> None:
    content, right = bytearray(b"weights" * 99_999), fence.claim(store, None)
    right.put("checkpoints/step-00000001/model.safetensors", memoryview(content))
    store.put("put", memoryview(content))
    version = store.get_versioned("put")[1]
    content[:7] = b"anothe "
    assert store.swap("put", memoryview(content), version)
    assert store.get("put") == content != store.get("checkpoints/step-00000001/model.safetensors")


@given(
    st.lists(
        st.tuples(st.integers(1, 60), st.booleans()), unique_by=lambda one: one[0], max_size=30
    ),
    st.integers(1, 4),
    st.booleans(),
    st.one_of(st.none(), st.integers(1, 4)),
)
def test_the_last_the_best_and_every_nth_checkpoint_are_retained(
    given_: list[tuple[int, bool]], last: int, best: bool, every: int | None
) -> None:
    policy = CheckpointPolicy(every_steps=1, keep_last=last, keep_best=best, keep_every=every)
    entries = [fence.Entry(step, "", is_best) for step, is_best in given_]
    steps = sorted(step for step, _ in given_)
    kept = {one.step for one in fence.retained(entries, policy)}
    bests = sorted(step for step, is_best in given_ if is_best)
    expected = set(steps[-last:]) | (set(bests[-1:]) if best else set())
    assert kept == expected | {step for step in steps if every and step % every == 0}
    assert fence.retained(fence.retained(entries, policy), policy) == fence.retained(
        entries, policy
    )


def test_keep_every_must_be_a_multiple_of_every_steps() -> None:
    document = {
        "name": "j",
        "data": {"uri": "builtin:digits"},
        "train": {"checkpoint": {"keep_every": 70}},
    }
    with pytest.raises(ValueError, match=r"keep_every as a multiple of every_steps \(50\), not 70"):
        Job.model_validate(document)


def test_the_holder_of_an_older_lease_cannot_claim(store: ObjectStore) -> None:
    write(fence.claim(store, 7), 10)
    before = {item.key: store.get(item.key) for item in store.list()}
    with pytest.raises(RunHeld, match=r"later lease \(token 7; this one's is 5\)"):
        fence.claim(store, 5)
    assert {item.key: store.get(item.key) for item in store.list()} == before
    assert [one.step for one in fence.claim(store, 7).require().checkpoints] == [10]


def test_a_stale_holder_can_neither_add_nor_replace_a_checkpoint(store: ObjectStore) -> None:
    stale = fence.claim(store, 5)
    write(stale, 10)
    stale.put("checkpoints/step-00000020/model.safetensors", b"of the stale one, before")
    newer = fence.claim(store, 7)
    write(newer, 20, b"of the new one")
    with pytest.raises(RunHeld):
        write(stale, 20, b"of the stale one")
    with pytest.raises(RunHeld):
        write(stale, 30, b"of the stale one")
    for step in (0, 10):  # refused even if the change would leave its list as it is
        with pytest.raises(RunHeld):
            stale.forget(after=step)
    assert [state.step for state in files.list_states(store)] == [10, 20]
    assert files.whole_model(store, files.list_states(store)[-1]) == b"of the new one"
    write(newer, 30, b"of the new one")  # replaces what the stale one left there
    assert [state.step for state in files.list_states(store)] == [10, 20, 30]
    assert files.whole_model(store, files.list_states(store)[-1]) == b"of the new one"


class Noted(FolderStore):
    """A folder that records its reads, listings and deletions."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.done = list[str]()

    def get(self, key: str) -> bytes:
        self.done.append("get")
        return super().get(key)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        self.done.append("list")
        return super().list(prefix)

    def delete(self, *keys: str) -> None:
        self.done.append("delete")
        super().delete(*keys)


def test_only_the_first_checkpoint_of_a_launch_lists_the_folder(tmp_path: Path) -> None:
    store = Noted(tmp_path)
    right = fence.claim(store, 1)
    write(right, 10)
    store.done.clear()
    for step in (20, 30, 40):
        write(right, step)
    # A folder's swap reads the current content under its lock.
    assert store.done == ["get", "get", "get", "delete"]
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*/*")) == sorted(
        ["model.safetensors", "state.json"] * 3
    )


def test_look_again_makes_the_next_commit_delete_orphaned_files(store: ObjectStore) -> None:
    right = fence.claim(store, 1)
    write(right, 10)
    orphan = "checkpoints/step-00000015/model-00001-of-00002.safetensors"
    store.put(orphan, b"of a rank that was lost")
    write(right, 20)
    assert orphan in {item.key for item in store.list()}
    right.look_again()
    write(right, 30)
    assert orphan not in {item.key for item in store.list()}
    assert [state.step for state in files.list_states(store)] == [10, 20, 30]


def test_checkpoints_of_an_earlier_launch_are_dropped_with_all_their_files(
    store: ObjectStore,
) -> None:
    before = fence.claim(store, 1)
    for step in (10, 20, 30):
        write(before, step)
    right = fence.claim(store, 2)
    for step in (40, 50):
        write(right, step)
    folders = {item.key.split("/")[1] for item in store.list("checkpoints/")}
    assert folders == {"step-00000030", "step-00000040", "step-00000050"}


def test_an_index_that_changed_since_it_was_read_is_read_again(store: ObjectStore) -> None:
    right = fence.claim(store, 1)
    write(right, 10)
    right.require()
    same = fence.Fence(store, right.owner)
    write(same, 20)
    right.commit(fence.Entry(30, "0"), [], CheckpointPolicy(keep_last=3))
    assert [one.step for one in right.require().checkpoints] == [10, 20, 30]


def test_if_many_claim_at_once_only_the_last_one_can_write(store: ObjectStore) -> None:
    barrier = threading.Barrier(4)

    def launch(number: int) -> fence.Fence | None:
        barrier.wait()
        try:
            return fence.claim(store, number)
        except RunHeld:
            return None

    with ThreadPoolExecutor(4) as pool:
        rights = [right for right in pool.map(launch, range(4)) if right is not None]
    able = []
    for right in rights:
        try:
            write(right, 10)
            able.append(right.owner)
        except RunHeld:
            continue
    index, _ = fence.read_index(store)
    assert able == [index.owner]
    assert [one.step for one in index.checkpoints] == [10]


def test_only_one_of_many_concurrent_swaps_succeeds(store: ObjectStore) -> None:
    assert store.swap("key", b"0", None)
    assert not store.swap("key", b"late", None)
    for number in range(1, 4):
        _, version = store.get_versioned("key")
        with ThreadPoolExecutor(6) as pool:
            marks = pool.map(
                lambda n, v=version, k=number: store.swap("key", b"%d-%d" % (k, n), v), range(6)
            )  # type: ignore[misc]
            winners = [writer for writer, mark in enumerate(marks) if mark is not None]
        assert len(winners) == 1
        assert store.get("key") == b"%d-%d" % (number, winners[0])
        assert not store.swap("key", b"stale", version)
    store.delete("key")
    assert not store.swap("key", b"gone", version)


def test_a_damaged_index_does_not_lose_the_checkpoints(store: ObjectStore) -> None:
    write(fence.claim(store, 7), 10, best=True)
    store.put(fence.INDEX, b'{"checkpoints": [')
    assert [(one.step, one.best) for one in fence.claim(store, 8).require().checkpoints] == [
        (10, True)
    ]


def test_without_an_index_leftovers_of_a_stale_holder_do_not_count(store: ObjectStore) -> None:
    stale = fence.claim(store, 5)
    write(stale, 10, token=5)
    newer = fence.claim(store, 7)
    write(newer, 20, token=7)
    with pytest.raises(RunHeld):
        write(stale, 30, token=5)
    store.delete(fence.INDEX)
    assert [state.step for state in files.list_states(store)] == [10, 20]


def test_the_state_is_plain_json(s3: S3Access) -> None:
    store = open_store("s3://fenced/plain", doors.settings())
    state = write(fence.claim(store, 3), 10, metrics={"loss": 0.5})
    document = json.loads(store.get("checkpoints/step-00000010/state.json"))
    assert document["schema_version"] == 2
    assert document["step"] == state.step
    assert document["metrics"] == {"loss": 0.5}
    assert load(save({"w": torch.ones(1)})).keys() == {"w"}
