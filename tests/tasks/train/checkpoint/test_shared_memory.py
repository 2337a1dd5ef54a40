"""Checkpoints on their way when processes are killed: what lies on this machine counts, and nothing half or stale does."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from training_case import NO_SPARE, SLOW, assert_every_sample_once, once, ranks, request

from trainwright.tasks import progress
from trainwright.tasks.errors import RunHeld, ServiceUnreachable
from trainwright.tasks.spec.job import CheckpointPolicy
from trainwright.tasks.storage.folder import FolderStore
from trainwright.tasks.storage.objects import Content, ObjectStore, sha256
from trainwright.tasks.train import train
from trainwright.tasks.train.checkpoint import files as checkpoint
from trainwright.tasks.train.checkpoint import shared_memory
from trainwright.tasks.train.checkpoint.fence import Fence, claim
from trainwright.tasks.train.checkpoint.tensors import HostCopy

EVERY = 5
POLICY = CheckpointPolicy()
Run = tuple[FolderStore, Path, str]
CHECKPOINTS = {"every_steps": EVERY, "keep_best": False}


def keep(
    work: Path,
    claim: str,
    rank: int,
    step: int,
    *,
    place: int = 0,
    generation: int = 1,
    shards: bool = False,
) -> Path:
    """What one of two ranks has kept of a checkpoint: its shard, or the first all of it. Returns where."""
    where = work / shared_memory.FOLDER / claim / f"rank-{rank}" / str(place)
    copies, tensor = HostCopy(where), torch.full((2,), float(step))
    whole = {"model.safetensors": {"w0": tensor, "w1": tensor}} if rank == 0 else {}
    taken = copies.take(
        {f"model-0000{rank + 1}-of-00002.safetensors": {f"w{rank}": tensor}} if shards else whole
    )
    assert copies.lasts
    files = {
        name: {"sha256": sha256(data), "size_bytes": len(data)} for name, data in taken.items()
    }
    before = {
        "model-00001-of-00003.safetensors": "0" * 64
    }  # of the checkpoint that the launch went on from
    state = checkpoint.State(
        step=step, epoch=0, split=[1, 1], members=[0, 1], owner=claim, sha256=before
    )
    rows = {f"metrics/steps-rank{rank}-00000000.parquet": [{"step": 0, "rank": rank}]}
    shared_memory.mark(where, rank, generation, state, files, rows)
    return where


def keep_both(work: Path, claim: str, step: int, **more: Any) -> list[Path]:
    return [keep(work, claim, rank, step, **more) for rank in (0, 1)]


@pytest.fixture
def run(tmp_path: Path) -> tuple[FolderStore, Path, str]:
    """A run's store, a work folder, and the claim of the launch that may add checkpoints."""
    store = FolderStore(tmp_path / "run")
    return store, tmp_path / "work", claim(store, None).owner


def newest(store: ObjectStore, folder: Path) -> tuple[int, dict[str, list[float]]] | None:
    """The step and the tensors that a start goes on from."""
    state = checkpoint.fetch_latest(store, folder / "resume")
    if state is None:
        return None
    return state.step, {
        name: one.tolist() for name, one in checkpoint.read_local(folder / "resume")[1].items()
    }


@pytest.mark.parametrize("shards", [False, True])
def test_what_all_ranks_have_kept_is_a_checkpoint_of_the_store(
    run: Run, tmp_path: Path, shards: bool
) -> None:
    store, work, owner = run
    keep_both(work, owner, 7, shards=shards)
    assert shared_memory.bring(store, work, POLICY) == 7
    assert newest(store, tmp_path) == (7, {"w0": [7, 7], "w1": [7, 7]})
    assert {item.key for item in store.list("metrics/")} == {
        f"metrics/steps-rank{rank}-00000000.parquet" for rank in (0, 1)
    }
    assert not list(work.iterdir())


def test_of_two_that_are_whole_the_newer_counts_and_the_older_where_the_newer_is_damaged(
    run: Run, tmp_path: Path
) -> None:
    store, work, owner = run
    keep_both(work, owner, 5, place=0)
    place = keep_both(work, owner, 7, place=1)[0]
    data = (place / "model.safetensors").read_bytes()
    (place / "model.safetensors").write_bytes(
        data[:-1] + b"x"
    )  # as one that was copied anew, or cut short with the power
    assert shared_memory.bring(store, work, POLICY) == 5
    assert newest(store, tmp_path) == (5, {"w0": [5, 5], "w1": [5, 5]})
    assert checkpoint.fetch_latest(store, tmp_path / "again") is not None


def lose_one(work: Path, owner: str) -> None:
    keep(work, owner, 0, 7)


def unlike_worlds(work: Path, owner: str) -> None:
    keep(work, owner, 0, 7)
    keep(work, owner, 1, 7, generation=2)


def unmarked(work: Path, owner: str) -> None:
    shared_memory.unmark(keep_both(work, owner, 7)[1])


def lost_file(work: Path, owner: str) -> None:
    (keep_both(work, owner, 7)[0] / "model.safetensors").unlink()


def cut_short(work: Path, owner: str) -> None:
    path = keep_both(work, owner, 7)[1] / shared_memory.MARK
    path.write_text(path.read_text()[:50])


def of_other_software(work: Path, owner: str) -> None:
    path = keep_both(work, owner, 7)[1] / shared_memory.MARK
    path.write_text(json.dumps(json.loads(path.read_text()) | {"more": 1}))


def strangely_named(work: Path, owner: str) -> None:
    path = keep_both(work, owner, 7)[1] / shared_memory.MARK
    path.write_text(
        json.dumps(
            json.loads(path.read_text()) | {"files": {"../../x": {"sha256": "", "size_bytes": 0}}}
        )
    )


def of_no_newer_step(work: Path, owner: str) -> None:
    keep_both(work, owner, 5)


def of_another_launch(work: Path, owner: str) -> None:
    keep_both(work, "another", 9)


@pytest.mark.parametrize(
    "leave",
    [
        lose_one,
        unlike_worlds,
        unmarked,
        lost_file,
        cut_short,
        of_other_software,
        strangely_named,
        of_no_newer_step,
        of_another_launch,
    ],
)
def test_what_is_no_newer_whole_checkpoint_of_this_launch_is_passed_over_and_removed(
    run: Run, tmp_path: Path, leave: Callable[[Path, str], None]
) -> None:
    store, work, owner = run
    state = checkpoint.State(step=5, epoch=0, split=[1, 1])
    checkpoint.write_state(Fence(store, owner), state, POLICY)
    leave(work, owner)
    assert shared_memory.bring(store, work, POLICY) is None
    assert [one.step for one in checkpoint.list_states(store)] == [5]
    assert not list(work.iterdir())


class Failing(FolderStore):
    """Takes so many changes, and then is away."""

    def __init__(self, root: Path, changes: int) -> None:
        super().__init__(root)
        self.left = changes

    def _part(self, key: str, data: Content) -> Path:
        if self.left == 0:
            raise ServiceUnreachable("away", service="store")
        self.left -= 1
        return super()._part(key, data)


def test_a_start_that_ends_at_any_moment_leaves_the_next_one_able_to_go_on(tmp_path: Path) -> None:
    changes = 0
    while True:
        folder = tmp_path / str(changes)
        store, work = FolderStore(folder / "run"), folder / "work"
        keep_both(work, claim(store, None).owner, 7, shards=True)
        try:
            shared_memory.bring(Failing(store.root, changes), work, POLICY)
            break
        except ServiceUnreachable:
            assert shared_memory.bring(store, work, POLICY) == 7
            assert newest(store, folder) == (7, {"w0": [7, 7], "w1": [7, 7]})
            changes += 1
    assert changes >= 6  # two files, two of rows, the state, the index


def test_a_launch_that_another_takes_over_from_meanwhile_brings_nothing(
    run: Run, tmp_path: Path
) -> None:
    store, work, owner = run
    keep_both(work, owner, 7)

    class TakenOver(FolderStore):
        def create(self, key: str, data: Content, digest: str | None = None) -> bool:
            if key.endswith("model.safetensors"):
                claim(store, None)
            return super().create(key, data, digest)

    with pytest.raises(RunHeld):
        shared_memory.bring(TakenOver(store.root), work, POLICY)
    assert newest(store, tmp_path) is None


def test_a_launch_forgets_its_own_alone(tmp_path: Path) -> None:
    for owner in ("mine", "theirs"):
        keep_both(tmp_path, owner, 7)
    shared_memory.forget(tmp_path, "mine")
    assert [path.name for path in (tmp_path / shared_memory.FOLDER).iterdir()] == ["theirs"]
    shared_memory.forget(tmp_path, "theirs")
    assert not list(tmp_path.iterdir())


def test_it_lies_in_shared_memory_and_what_nobody_came_back_for_goes_after_a_day(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, work, owner = run
    shared = tmp_path / "shared"
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", shared)
    shared.mkdir()
    shared_memory.prepare(tmp_path / "left")
    place = keep(tmp_path / "left", owner, 0, 7)
    shared_memory.prepare(work)
    keep_both(work, owner, 7)
    assert len(list(shared.iterdir())) == 2
    for path in (
        place / shared_memory.MARK,
        *(tmp_path / "left" / shared_memory.FOLDER).resolve().rglob("*"),
    ):
        os.utime(path, (0, 0))
    os.utime((tmp_path / "left" / shared_memory.FOLDER).resolve(), (0, 0))
    shared_memory.prepare(tmp_path / "other")
    assert not place.exists()
    assert shared_memory.bring(store, work, POLICY) == 7
    assert not list(work.iterdir())
    assert [path.name for path in shared.iterdir()] == [
        (tmp_path / "other" / shared_memory.FOLDER).readlink().name
    ]
    shared_memory.prepare(tmp_path / "left")  # whose link led nowhere
    assert keep(tmp_path / "left", owner, 0, 8).exists()


def test_what_a_work_folder_that_is_gone_had_goes_with_the_next_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", shared)
    shared.mkdir()
    places = {}
    for name in ("there", "deleted", "elsewhere", "replaced", "disk/away"):
        with monkeypatch.context() as there:
            if name == "elsewhere":  # a container that shares this one's memory, not its files
                there.setattr(shared_memory, "_namespace", lambda: b"1")
            shared_memory.prepare(tmp_path / name)
        keep(tmp_path / name, "mine", 0, 7)
        places[name] = (tmp_path / name / shared_memory.FOLDER).readlink()
    for name in ("deleted", "elsewhere"):
        shutil.rmtree(tmp_path / name)
    (tmp_path / "disk").rename(tmp_path / "unmounted")
    foreign = shared / "trainwright-kept-foreign"
    foreign.mkdir()
    (foreign / "of").write_bytes(b"\xff\0 \xff\0/work")
    (tmp_path / "replaced" / shared_memory.FOLDER).unlink()
    (tmp_path / "replaced" / shared_memory.FOLDER).mkdir()
    shared_memory.prepare(tmp_path / "next")
    next_one = (tmp_path / "next" / shared_memory.FOLDER).readlink()
    stay = [places["there"], places["elsewhere"], places["disk/away"], foreign, next_one]
    assert sorted(shared.iterdir()) == sorted(stay)


def test_without_shared_memory_it_lies_in_the_work_folder(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, work, owner = run
    work.mkdir()
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", tmp_path / "none")
    shared_memory.prepare(work)
    keep_both(work, owner, 7)
    assert shared_memory.bring(store, work, POLICY) == 7


@pytest.mark.parametrize("why", ["in the way", "full", "not mappable"])
def test_a_copy_that_the_disk_does_not_take_is_made_in_memory_until_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    tensors = {"model": {"w": torch.ones(2)}, "optimizer": {"w": torch.ones(3)}}
    copies = HostCopy(tmp_path / "file" / "0")
    with monkeypatch.context() as there:
        if why == "in the way":
            (tmp_path / "file").touch()
        elif why == "full":
            there.setattr("trainwright.tasks.train.checkpoint.tensors.LEFT_FREE_BYTES", 1 << 62)
        else:
            there.setattr(
                torch,
                "from_file",
                lambda *_, **__: (_ for _ in ()).throw(RuntimeError("unable to mmap")),
            )
        assert copies.take(tensors)["model"].nbytes > 8
        assert not copies.lasts
        assert not (tmp_path / "file" / "0").exists() or not list(
            (tmp_path / "file" / "0").iterdir()
        )
        if why == "full":  # the memory is used again
            first, again = (
                torch.frombuffer(copies.take(tensors)["model"], dtype=torch.uint8) for _ in range(2)
            )
            assert first.data_ptr() == again.data_ptr()
    if why == "in the way":
        (tmp_path / "file").unlink()
    copies.take(tensors)
    assert copies.lasts


def test_a_mark_that_the_disk_does_not_take_is_none(tmp_path: Path) -> None:
    (tmp_path / f"{shared_memory.MARK}.part").mkdir()
    shared_memory.mark(tmp_path, 0, 1, checkpoint.State(step=1, epoch=0, split=[1]), {}, {})
    assert not (tmp_path / shared_memory.MARK).exists()


def test_files_of_tensors_that_are_no_longer_copied_go(tmp_path: Path) -> None:
    copies = HostCopy(tmp_path / "0")
    for name in ("model-00001-of-00003.safetensors", "model-00001-of-00002.safetensors"):
        copies.take({name: {"w": torch.ones(2)}})
    assert [path.name for path in (tmp_path / "0").iterdir()] == [
        "model-00001-of-00002.safetensors"
    ]


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
        json.loads((run / "checkpoints.json").read_text())["checkpoints"]
        if (run / "checkpoints.json").exists()
        else []
    )
    return max((one["step"] for one in entries), default=0)


def marked(work: Path, step: int) -> bool:
    """Whether both ranks keep their part of this checkpoint."""
    found = set()
    for path in work.glob(f"{shared_memory.FOLDER}/*/rank-*/*/{shared_memory.MARK}"):
        with suppress(FileNotFoundError):  # a newer one takes its place
            one = json.loads(path.read_text())
            found.add((one["state"]["step"], one["rank"]))
    return {(step, 0), (step, 1)} <= found


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < until, "did not come about in five minutes"
        time.sleep(0.01)


def killed_with_a_checkpoint_on_its_way(
    folder: Path, step: Callable[[], int], kill: Callable[[], object]
) -> int:
    """Kill when the checkpoint after the newest one that counts is on its way, and the next about to begin; the former's step."""
    run, work = folder / "run", folder / "work"
    wait_until(lambda: stored(run) >= 2 * EVERY)
    with held_back(run):
        began = stored(run)
        wait_until(lambda: step() >= began + 2 * EVERY - 1 and marked(work, began + EVERY))
        kill()
    return began + EVERY


def killed_while_the_store_is_slow(
    folder: Path, processes: Callable[[], dict[int, Any]], began: list[int]
) -> None:
    """Kill all ranks when the store is three checkpoints behind what they keep; what they keep then goes to `began`."""
    run, work = folder / "run", folder / "work"
    wait_until(lambda: stored(run) >= EVERY)
    with held_back(run):
        late, until = stored(run) + 3 * EVERY, time.monotonic() + 300
        while time.monotonic() < until:
            for process in processes().values():
                process.send_signal(signal.SIGSTOP)  # so that none is about to keep a newer one
            if kept_now := [
                step for step in range(late, late + 20 * EVERY, EVERY) if marked(work, step)
            ]:
                began.append(kept_now[-1])
                break
            for process in processes().values():
                process.send_signal(signal.SIGCONT)
            time.sleep(0.05)
        for process in processes().values():
            process.send_signal(signal.SIGKILL)


def test_a_launcher_that_is_killed_costs_no_more_than_an_interval(tmp_path: Path) -> None:
    spec: dict[str, Any] = {"epochs": 4, "backend": "torch", "checkpoint": CHECKPOINTS, **NO_SPARE}
    asked = request(tmp_path / "a", [40, 20], devices=SLOW, **spec)
    (tmp_path / "request.json").write_text(asked.model_dump_json(by_alias=True))
    said = tmp_path / "progress"
    said.touch()
    launcher = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from pathlib import Path; from trainwright.tasks import progress;"
            "from trainwright.tasks.train import TrainRequest, train;"
            "progress.listen(progress.appended_to(Path(sys.argv[2])));"
            "train(TrainRequest.model_validate_json(Path(sys.argv[1]).read_text()))",
            str(tmp_path / "request.json"),
            str(said),
        ],
    )

    def step() -> int:
        events = [json.loads(line) for line in said.read_text().splitlines() if line.endswith("}")]
        return max((event["step"] for event in events if event["event"] == "train"), default=0)

    try:
        begun = killed_with_a_checkpoint_on_its_way(tmp_path / "a", step, launcher.kill)
    finally:
        launcher.kill()
        launcher.wait()
    assert (
        tmp_path / "a" / "work" / shared_memory.FOLDER
    ).readlink().parent == shared_memory.SHARED_MEMORY
    result = train(asked)
    assert result.resumed_from_step is not None
    assert result.resumed_from_step >= begun
    whole = request(tmp_path / "b", [40, 20], **spec)
    train(whole)
    assert assert_every_sample_once(asked, 2, 4) == assert_every_sample_once(whole, 2, 4)
    assert not os.path.lexists(tmp_path / "a" / "work" / shared_memory.FOLDER)


@pytest.mark.parametrize("store", ["as it is", "slow"])
def test_ranks_that_are_all_killed_at_once_cost_no_more_than_an_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str
) -> None:
    heard: list[dict[str, Any]] = []
    progress.listen(heard.append)
    epochs = 8 if store == "slow" else 4
    asked = request(
        tmp_path, [40, 20], devices=SLOW, epochs=epochs, backend="torch", checkpoint=CHECKPOINTS
    )
    begun: list[int] = []

    def kill() -> None:
        for process in ranks().values():
            process.send_signal(signal.SIGKILL)

    def step() -> int:
        return max((event["step"] for event in heard if event["event"] == "train"), default=0)

    def kill_all() -> None:
        if store == "slow":
            killed_while_the_store_is_slow(tmp_path, ranks, begun)
        else:
            begun.append(killed_with_a_checkpoint_on_its_way(tmp_path, step, kill))

    watcher = once(lambda: True, kill_all)
    train(asked)
    watcher.join()
    (message,) = [
        event["message"]
        for event in heard
        if "kept on this machine arrived" in event.get("message", "")
    ]
    newest = int(message.split("[")[1].rstrip("]"))
    assert newest >= begun[0]
    told = f"no rank that had the training's state is left: it goes on from the checkpoint of step {newest}"
    assert told in [event.get("message") for event in heard]
    assert_every_sample_once(asked, 2, epochs)
