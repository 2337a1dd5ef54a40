"""Checkpoints on their way when processes are killed: what lies on this machine counts, and nothing half or stale does."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from training_case import NO_SPARE, assert_every_sample_once, once, ranks, request

from trainwright.tasks import progress
from trainwright.tasks.folder_store import FolderStore
from trainwright.tasks.job import CheckpointPolicy
from trainwright.tasks.train import checkpoint, kept, train
from trainwright.tasks.train.checkpoint_writer import PendingCheckpoint
from trainwright.tasks.train.fence import claim
from trainwright.tasks.train.spill import recover
from trainwright.tasks.train.tensors import HostCopy

SLOW = [{"type": "emulated", "speed": 1.0}, {"type": "emulated", "speed": 0.5}]
"""Devices on which a step of 40 and 20 samples takes 40 ms."""
EVERY = 5
CHECKPOINTS = {"every_steps": EVERY, "keep_best": False}


def keep(work: Path, rank: int, step: int, owner: str, *, generation: int = 1, shards: bool = False) -> Path:
    """What one of two ranks has kept of a checkpoint: its shard, or the first all of it. Returns where."""
    place = kept.places(work, rank)[0]
    copies, tensor = HostCopy(place), torch.full((2,), float(step))
    whole = {"model.safetensors": {"w0": tensor, "w1": tensor}} if rank == 0 else {}
    files = copies.take({f"model-0000{rank + 1}-of-00002.safetensors": {f"w{rank}": tensor}} if shards else whole)
    state = checkpoint.State(step=step, epoch=0, split=[1, 1], members=[0, 1], owner=owner)
    rows = {f"metrics/steps-rank{rank}-00000000.parquet": [{"step": 0, "rank": rank}]}
    job = PendingCheckpoint(state, files, copies, [], False, generation, rank == 0)
    kept.mark(place, rank, job, rows)
    assert copies.lasts
    return place


@pytest.mark.parametrize("shards", [False, True])
def test_what_all_ranks_have_kept_is_a_checkpoint_of_the_store(tmp_path: Path, shards: bool) -> None:
    store, work = FolderStore(tmp_path / "run"), tmp_path / "work"
    owner = claim(store, None).owner
    for rank in (0, 1):
        keep(work, rank, 7, owner, shards=shards)
    assert kept.into_spill(work, newer_than=5) == 7
    assert recover(store, work, CheckpointPolicy()) == [7]
    state = checkpoint.fetch_latest(store, tmp_path / "here")
    assert state is not None
    assert {name: one.tolist() for name, one in checkpoint.read_local(tmp_path / "here")[1].items()} == {
        "w0": [7, 7], "w1": [7, 7],
    }  # fmt: skip
    assert {item.key for item in store.list("metrics/")} == {
        f"metrics/steps-rank{rank}-00000000.parquet" for rank in (0, 1)
    }
    assert not list(work.iterdir())


def lose_one(work: Path, owner: str) -> None:
    keep(work, 0, 7, owner)


def unlike_worlds(work: Path, owner: str) -> None:
    keep(work, 0, 7, owner)
    keep(work, 1, 7, owner, generation=2)


def unmarked(work: Path, owner: str) -> None:
    keep(work, 0, 7, owner)
    kept.unmark(keep(work, 1, 7, owner))


def of_another_start(work: Path, owner: str) -> None:
    for rank in (0, 1):
        path = keep(work, rank, 7, owner) / kept.MARK
        path.write_text(json.dumps(json.loads(path.read_text()) | {"boot": "another"}))


def cut_short(work: Path, owner: str) -> None:
    keep(work, 0, 7, owner)
    path = keep(work, 1, 7, owner) / kept.MARK
    path.write_text(path.read_text()[:50])


def of_other_software(work: Path, owner: str) -> None:
    keep(work, 0, 7, owner)
    path = keep(work, 1, 7, owner) / kept.MARK
    path.write_text(json.dumps(json.loads(path.read_text()) | {"more": 1}))


def of_no_newer_step(work: Path, owner: str) -> None:
    for rank in (0, 1):
        keep(work, rank, 5, owner)


@pytest.mark.parametrize(
    "leave", [lose_one, unlike_worlds, unmarked, of_another_start, cut_short, of_other_software, of_no_newer_step]
)
def test_what_is_no_whole_checkpoint_is_passed_over_and_removed(
    tmp_path: Path, leave: Callable[[Path, str], None]
) -> None:
    work = tmp_path / "work"
    leave(work, "me")
    assert kept.into_spill(work, newer_than=5) is None
    assert not list(work.iterdir())


def test_what_another_launch_has_overtaken_stays_out(tmp_path: Path) -> None:
    store, work = FolderStore(tmp_path / "run"), tmp_path / "work"
    owner = claim(store, None).owner
    for rank in (0, 1):
        keep(work, rank, 7, owner)
    claim(store, None)
    kept.into_spill(work, newer_than=0)
    assert recover(store, work, CheckpointPolicy()) == []
    assert checkpoint.fetch_latest(store, tmp_path / "here") is None


def test_a_copy_that_the_disk_does_not_take_is_made_in_memory_alone(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    copies = HostCopy(tmp_path / "file" / "0")
    assert copies.take({"model": {"w": torch.ones(2)}})["model"].nbytes > 8
    assert not copies.lasts


def test_a_mark_that_the_disk_does_not_take_is_none(tmp_path: Path) -> None:
    copies, state = HostCopy(tmp_path / "0"), checkpoint.State(step=1, epoch=0, split=[1])
    files = copies.take({"model": {"w": torch.ones(2)}})
    (tmp_path / "0" / f"{kept.MARK}.part").symlink_to("/proc/no/such/file")
    kept.mark(tmp_path / "0", 0, PendingCheckpoint(state, files, copies, [], False, 1, True), {})
    assert [path.name for path in (tmp_path / "0").iterdir()] == ["model"]


def test_files_of_tensors_that_are_no_longer_copied_go(tmp_path: Path) -> None:
    copies = HostCopy(tmp_path / "0")
    for name in ("model-00001-of-00003.safetensors", "model-00001-of-00002.safetensors"):
        copies.take({name: {"w": torch.ones(2)}})
    assert [path.name for path in (tmp_path / "0").iterdir()] == ["model-00001-of-00002.safetensors"]


@contextmanager
def held_back(run: Path) -> Iterator[None]:
    """No checkpoint comes to count meanwhile: its index can't be written."""
    descriptor = os.open(run, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(descriptor)


def stored(run: Path) -> int:
    """The newest step that counts."""
    entries = (
        json.loads((run / "checkpoints.json").read_text())["checkpoints"] if (run / "checkpoints.json").exists() else []
    )
    return max((one["step"] for one in entries), default=0)


def killed_with_a_checkpoint_on_its_way(run: Path, step: Callable[[], int], kill: Callable[[], object]) -> int:
    """Kill when two intervals have gone by since the newest checkpoint that counts; the step of the newest that was begun."""
    while stored(run) < 2 * EVERY:
        time.sleep(0.01)
    with held_back(run):
        began = stored(run)
        while (reached := step()) < began + 2 * EVERY + 2:
            time.sleep(0.01)
        kill()
    return (reached - 1) // EVERY * EVERY  # a step is told of before its checkpoint is begun


def test_a_launcher_that_is_killed_costs_no_more_than_an_interval(tmp_path: Path) -> None:
    spec: dict[str, Any] = {
        "devices": SLOW, "epochs": 2, "backend": "torch", "checkpoint": CHECKPOINTS, **NO_SPARE,
    }  # fmt: skip
    asked = request(tmp_path / "a", [40, 20], **spec)
    (tmp_path / "request.json").write_text(asked.model_dump_json(by_alias=True))
    said = tmp_path / "progress"
    launcher = subprocess.Popen(
        [
            sys.executable, "-c",
            "import sys; from pathlib import Path; from trainwright.tasks.train import TrainRequest, train;"
            "train(TrainRequest.model_validate_json(Path(sys.argv[1]).read_text()))",
            str(tmp_path / "request.json"),
        ],
        env={**os.environ, "TRAINWRIGHT_PROGRESS": str(said)},
    )  # fmt: skip

    def step() -> int:
        events = [json.loads(line) for line in said.read_text().splitlines() if line.endswith("}")]
        return max((event["step"] for event in events if event["event"] == "train"), default=0)

    begun = killed_with_a_checkpoint_on_its_way(tmp_path / "a" / "run", step, launcher.kill)
    launcher.wait()
    result = train(asked)
    assert result.resumed_from_step is not None
    assert result.resumed_from_step >= begun
    whole = request(tmp_path / "b", [40, 20], **spec)
    train(whole)
    assert assert_every_sample_once(asked, 2, 2) == assert_every_sample_once(whole, 2, 2)
    assert not (tmp_path / "a" / "work" / kept.FOLDER).exists()


def test_ranks_that_are_all_killed_at_once_cost_no_more_than_an_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[dict[str, Any]] = []
    monkeypatch.setattr(progress, "_listeners", [heard.append])
    asked = request(tmp_path, [40, 20], devices=SLOW, epochs=2, backend="torch", checkpoint=CHECKPOINTS)
    begun: list[int] = []

    def kill() -> None:
        for process in ranks().values():
            process.send_signal(signal.SIGKILL)

    def step() -> int:
        return max((event["step"] for event in heard if event["event"] == "train"), default=0)

    watcher = once(
        lambda: True, lambda: begun.append(killed_with_a_checkpoint_on_its_way(tmp_path / "run", step, kill))
    )
    train(asked)
    watcher.join()
    (message,) = [event["message"] for event in heard if "kept on this machine arrived" in event.get("message", "")]
    assert int(message.split("[")[1].rstrip("]")) >= begun[0]
    assert_every_sample_once(asked, 2, 2)
