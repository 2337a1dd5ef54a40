"""After a kill, the next start uploads staged checkpoints, but no incomplete or stale ones."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from trainwright.tasks.errors import RunHeld, ServiceUnreachable
from trainwright.tasks.spec.train_spec import CheckpointPolicy
from trainwright.tasks.storage.folder import FolderStore
from trainwright.tasks.storage.objects import Content, ObjectStore
from trainwright.tasks.train.checkpoint import files as checkpoint
from trainwright.tasks.train.checkpoint import staged
from trainwright.tasks.train.checkpoint.fence import Fence, claim
from trainwright.tasks.train.checkpoint.local_checkpoint import LocalCheckpoint
from trainwright.tasks.train.checkpoint.tensors import as_file
from trainwright.tasks.train.checkpoint.uploader import recover
from trainwright.tasks.train.record.journal import StepJournal

POLICY = CheckpointPolicy()
Run = tuple[FolderStore, Path, str]


def stage(
    work: Path, launch: str, step: int, *, shards: bool = False, spill: bool = False
) -> staged.Staged:
    """Stage a checkpoint of two ranks, with a shard from each or one file from the first."""
    area, tensor = staged.StagingArea(work, launch), torch.full((2,), float(step))
    parts = {rank: {f"w{rank}": tensor} for rank in (0, 1)}
    wanted = {f"model-0000{rank + 1}-of-00002.safetensors": parts[rank] for rank in (0, 1)}
    if not shards:
        wanted = {"model.safetensors": parts[0] | parts[1]}
    name, paths = staged.part_name(1, step), list[str]()
    for file, tensors in wanted.items():
        pieces = as_file(tensors)
        with area.create(name, file, sum(map(len, pieces)), spill=spill) as opened:
            opened.writelines(pieces)
            paths.append(opened.name)
    for rank in (0, 1):
        journal = StepJournal(work, rank)
        journal.add(step=0, rank=rank)
    state = checkpoint.CheckpointState(
        step=step, epoch=0, split=[1, 1], members=[0, 1], owner=launch
    )
    return area.stage(name, state, paths)


def mark_of(work: Path, launch: str) -> Path:
    (mark,) = staged.StagingArea(work, launch).disk.glob("step-*.json")
    return mark


def file_of(work: Path, launch: str, step: int, place: str = staged.STAGING) -> Path:
    return work / place / launch / staged.part_name(1, step) / "model.safetensors"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run's store, a work folder, and the launch that may add checkpoints."""
    store = FolderStore(tmp_path / "run")
    return store, tmp_path / "work", claim(store, None).owner


def newest(store: ObjectStore, folder: Path) -> tuple[int, dict[str, list[float]]] | None:
    """The step and the tensors from which a start would resume."""
    state = checkpoint.fetch_latest(store, folder / "resume")
    if state is None:
        return None
    return state.step, {
        name: one.tolist()
        for name, one in LocalCheckpoint(folder / "resume").tensors(checkpoint.MODEL).items()
    }


def left(work: Path) -> list[str]:
    """The content of a work folder besides the journal."""
    return [path.name for path in work.iterdir() if path.name != "journal"]


@pytest.mark.parametrize("shards", [False, True])
def test_recovery_uploads_a_checkpoint_that_all_ranks_have_staged(
    run: Run, tmp_path: Path, shards: bool
) -> None:
    store, work, owner = run
    stage(work, owner, 7, shards=shards)
    assert recover(store, work, POLICY) == [7]
    assert newest(store, tmp_path) == (7, {"w0": [7, 7], "w1": [7, 7]})
    assert {item.key for item in store.list("metrics/")} == {
        f"metrics/steps-rank{rank}-00000000.parquet" for rank in (0, 1)
    }
    assert left(work) == []


def test_recovery_uploads_complete_checkpoints_in_order_and_only_those_the_policy_keeps(
    run: Run, tmp_path: Path
) -> None:
    store, work, owner = run
    for step in (9, 5, 7):
        stage(work, owner, step)
    assert recover(store, work, CheckpointPolicy(keep_last=2)) == [7, 9]
    assert [one.step for one in checkpoint.list_states(store)] == [7, 9]
    assert newest(store, tmp_path) == (9, {"w0": [9, 9], "w1": [9, 9]})


@pytest.mark.parametrize("damage", ["changed", "cut short", "missing"])
def test_if_the_newer_of_two_synced_checkpoints_is_damaged_the_older_counts(
    run: Run, tmp_path: Path, damage: str
) -> None:
    store, work, owner = run
    for step in (5, 7):
        stage(work, owner, step, spill=True).sync()
    file = file_of(work, owner, 7, staged.SPILL)
    data = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(data[:-1] + (b"x" if damage == "changed" else b""))
    assert recover(store, work, POLICY) == [5]
    assert newest(store, tmp_path) == (5, {"w0": [5, 5], "w1": [5, 5]})
    assert checkpoint.fetch_latest(store, tmp_path / "again") is not None


def unmarked(work: Path, owner: str) -> None:
    stage(work, owner, 7)
    mark_of(work, owner).unlink()


def removed(work: Path, owner: str) -> None:
    stage(work, owner, 7)
    staged.StagingArea(work, owner).remove(staged.part_name(1, 7), again=True)


def lost_file(work: Path, owner: str) -> None:
    stage(work, owner, 7)
    file_of(work, owner, 7).unlink()


def cut_short(work: Path, owner: str) -> None:
    stage(work, owner, 7)
    mark_of(work, owner).write_text(mark_of(work, owner).read_text()[:50])


def changed(work: Path, owner: str, **fields: Any) -> None:
    stage(work, owner, 7)
    mark = mark_of(work, owner)
    mark.write_text(json.dumps(json.loads(mark.read_text()) | fields))


def of_other_software(work: Path, owner: str) -> None:
    changed(work, owner, state={"steps": 7})


def strangely_named(work: Path, owner: str) -> None:
    changed(work, owner, paths=["../../x"])


def of_before_the_machine_was_restarted(work: Path, owner: str) -> None:
    changed(work, owner, boot="another")


def of_no_newer_step(work: Path, owner: str) -> None:
    stage(work, owner, 5)


def of_another_launch(work: Path, owner: str) -> None:
    stage(work, "another", 9)


@pytest.mark.parametrize(
    "leave",
    [
        unmarked,
        removed,
        lost_file,
        cut_short,
        of_other_software,
        strangely_named,
        of_before_the_machine_was_restarted,
        of_no_newer_step,
        of_another_launch,
    ],
)
def test_recovery_skips_and_removes_all_but_newer_complete_checkpoints_of_this_launch(
    run: Run, leave: Callable[[Path, str], None]
) -> None:
    store, work, owner = run
    state = checkpoint.CheckpointState(step=5, epoch=0, split=[1, 1])
    checkpoint.write_state(Fence(store, owner), state, POLICY)
    leave(work, owner)
    assert recover(store, work, POLICY) == []
    assert [one.step for one in checkpoint.list_states(store)] == [5]
    assert left(work) == []


class Failing(FolderStore):
    """A folder that accepts a number of changes and then is unreachable."""

    def __init__(self, root: Path, changes: int) -> None:
        super().__init__(root)
        self.left = changes

    def _change(self) -> None:
        if self.left == 0:
            raise ServiceUnreachable("away", service="store")
        self.left -= 1

    def create(self, key: str, data: Content, digest: str | None = None) -> bool:
        self._change()
        return super().create(key, data, digest)

    def swap(
        self, key: str, data: Content, version: str | None, digest: str | None = None
    ) -> str | None:
        self._change()
        return super().swap(key, data, version, digest)


@pytest.mark.parametrize("spill", [False, True])
def test_a_recovery_interrupted_at_any_point_can_be_repeated(tmp_path: Path, spill: bool) -> None:
    changes = 0
    while True:
        folder = tmp_path / str(changes)
        store, work = FolderStore(folder / "run"), folder / "work"
        owner = claim(store, None).owner
        stage(work, owner, 7, shards=True, spill=spill)
        try:
            recover(Failing(store.root, changes), work, POLICY)
            break
        except ServiceUnreachable:
            assert recover(store, work, POLICY) == [7]
            assert newest(store, folder) == (7, {"w0": [7, 7], "w1": [7, 7]})
            changes += 1
    assert changes >= 6  # two files, two parts of rows, the state, the index


def test_recovery_uploads_nothing_if_another_launch_takes_over_meanwhile(
    run: Run, tmp_path: Path
) -> None:
    store, work, owner = run
    stage(work, owner, 7)

    class TakenOver(FolderStore):
        def create(self, key: str, data: Content, digest: str | None = None) -> bool:
            if key.endswith("model.safetensors"):
                claim(store, None)
            return super().create(key, data, digest)

    with pytest.raises(RunHeld):
        recover(TakenOver(store.root), work, POLICY)
    assert newest(store, tmp_path) is None


def test_checkpoints_synced_to_disk_survive_a_restart_of_the_machine(
    run: Run, tmp_path: Path
) -> None:
    store, work, owner = run
    stage(work, owner, 7, spill=True).sync()
    stage(work, owner, 9, spill=True)
    for mark in staged.StagingArea(work, owner).disk.glob("*.json"):
        content = json.loads(mark.read_text())
        content["boot"] = content["boot"] and "another"
        mark.write_text(json.dumps(content))
    assert recover(store, work, POLICY) == [7]


def test_forget_removes_only_the_launchs_own_checkpoints(tmp_path: Path) -> None:
    for owner in ("mine", "theirs"):
        stage(tmp_path, owner, 7)
    staged.StagingArea(tmp_path, "mine").forget()
    assert [path.name for path in (tmp_path / staged.STAGING).iterdir()] == ["theirs"]
    staged.StagingArea(tmp_path, "theirs").forget()
    assert left(tmp_path) == []


def test_staging_is_in_shared_memory_and_abandoned_folders_are_removed_after_a_day(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, work, owner = run
    shared = tmp_path / "shared"
    monkeypatch.setattr(staged, "SHARED_MEMORY", shared)
    shared.mkdir()
    staged.prepare(tmp_path / "left")
    stage(tmp_path / "left", owner, 7)
    staged.prepare(work)
    stage(work, owner, 7)
    assert len(list(shared.iterdir())) == 2
    abandoned = (tmp_path / "left" / staged.STAGING).resolve()
    for path in (*abandoned.rglob("*"), abandoned):
        os.utime(path, (0, 0))
    staged.prepare(tmp_path / "other")
    assert not abandoned.exists()
    assert recover(store, work, POLICY) == [7]
    assert left(work) == []
    assert [path.name for path in shared.iterdir()] == [
        (tmp_path / "other" / staged.STAGING).readlink().name
    ]
    staged.prepare(tmp_path / "left")  # its link was dangling
    stage(tmp_path / "left", owner, 8)
    assert mark_of(tmp_path / "left", owner).exists()


def test_the_next_training_removes_the_shared_memory_of_deleted_work_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    monkeypatch.setattr(staged, "SHARED_MEMORY", shared)
    shared.mkdir()
    places = {}
    for name in ("there", "deleted", "elsewhere", "replaced", "disk/away"):
        staged.prepare(tmp_path / name)
        stage(tmp_path / name, "mine", 7)
        places[name] = (tmp_path / name / staged.STAGING).readlink()
    # As left by a container that shares this machine's memory, but not its files.
    (places["elsewhere"] / "of").write_bytes(b"1 " + os.fsencode(tmp_path / "elsewhere"))
    for name in ("deleted", "elsewhere"):
        shutil.rmtree(tmp_path / name)
    (tmp_path / "disk").rename(tmp_path / "unmounted")
    foreign = shared / "trainwright-staging-foreign"
    foreign.mkdir()
    (foreign / "of").write_bytes(b"\xff\0 \xff\0/work")
    (tmp_path / "replaced" / staged.STAGING).unlink()
    (tmp_path / "replaced" / staged.STAGING).mkdir()
    staged.prepare(tmp_path / "next")
    next_one = (tmp_path / "next" / staged.STAGING).readlink()
    stay = [places["there"], places["elsewhere"], places["disk/away"], foreign, next_one]
    assert sorted(shared.iterdir()) == sorted(stay)


def test_without_shared_memory_staging_is_in_the_work_folder(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, work, owner = run
    work.mkdir()
    monkeypatch.setattr(staged, "SHARED_MEMORY", tmp_path / "none")
    staged.prepare(work)
    stage(work, owner, 7)
    assert recover(store, work, POLICY) == [7]


@pytest.mark.parametrize("spill", [False, True])
def test_a_part_goes_to_the_other_folder_if_one_has_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spill: bool
) -> None:
    wanted, other = (staged.SPILL, staged.STAGING) if spill else (staged.STAGING, staged.SPILL)
    area = staged.StagingArea(tmp_path, "mine")
    usage = shutil.disk_usage

    def full(folder: Path) -> Any:
        return usage(folder)._replace(free=0) if wanted in folder.parts else usage(folder)

    (tmp_path / wanted).mkdir()
    with monkeypatch.context() as there:
        there.setattr(shutil, "disk_usage", full)
        with area.create("step-00000007-1", "model.safetensors", 3, spill=spill) as opened:
            assert opened.name == str(tmp_path / other / "mine/step-00000007-1/model.safetensors")
        there.setattr(staged, "LEFT_FREE_BYTES", 1 << 62)
        with pytest.raises(OSError, match="no room for 3 bytes in"):
            area.create("step-00000007-1", "model.safetensors", 3, spill=spill)
    with area.create("step-00000009-1", "model.safetensors", 3, spill=spill) as opened:
        assert Path(opened.name).parents[2] == tmp_path / wanted


def test_a_checkpoint_whose_mark_cannot_be_written_is_not_found(tmp_path: Path) -> None:
    (tmp_path / staged.SPILL).touch()
    one = stage(tmp_path, "mine", 7)
    assert [name for name, _ in one.files()] == ["model.safetensors"]
    assert staged.StagingArea(tmp_path, "mine").found() == []


def test_files_are_reused_while_the_ranks_stay_the_same(tmp_path: Path) -> None:
    area = staged.StagingArea(tmp_path, "mine")
    inodes = []
    for step in (5, 7):
        stage(tmp_path, "mine", step)
        path = file_of(tmp_path, "mine", step)
        inodes.append(path.stat().st_ino)
        assert load(path.read_bytes())["w0"].tolist() == [step, step]
        area.remove(staged.part_name(1, step), again=True)
    assert inodes[0] == inodes[1]
    stage(tmp_path, "mine", 9, shards=True)
    area.remove(staged.part_name(1, 9), again=True)
    free = sorted(path.name for path in (tmp_path / staged.STAGING / "mine/free").iterdir())
    assert free == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def test_a_reused_file_is_truncated_to_the_smaller_part(tmp_path: Path) -> None:
    area = staged.StagingArea(tmp_path, "mine")
    for step, size in ((5, 100), (7, 10)):
        pieces = as_file({"w": torch.zeros(size)})
        name = staged.part_name(1, step)
        with area.create(name, "model.safetensors", sum(map(len, pieces)), spill=False) as opened:
            opened.writelines(pieces)
        assert load(Path(opened.name).read_bytes())["w"].tolist() == [0.0] * size
        area.remove(name, again=True)
