"""Checkpoints under faults: a stopped or killed store, full disks, killed ranks, damaged files,
another number of ranks."""

from __future__ import annotations

import contextlib
import resource
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import doors
import psutil
import pytest
import torch
from safetensors.torch import load
from training_case import NO_SPARE, SLOW, alone, ranks, request

from trainwright.infra.background_process import stop
from trainwright.infra.s3_server import s3_service, start_s3
from trainwright.tasks import progress
from trainwright.tasks.errors import Interrupted, RunHeld, ServiceUnreachable
from trainwright.tasks.storage.connect import open_store
from trainwright.tasks.storage.objects import ObjectStore
from trainwright.tasks.train import TrainRequest, train
from trainwright.tasks.train.checkpoint import files
from trainwright.tasks.train.checkpoint.fence import claim
from trainwright.tasks.train.checkpoint.uploader import ANSWER_S
from trainwright.tasks.train.record.metrics import read_rows

LARGE = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(36 + 28)  # its num_batches_tracked is a scalar
        self.out = torch.nn.Linear(64, 10)
        self.tied = self.out
        # Large enough to be sharded.
        self.register_buffer("ballast", torch.arange(9_000_000 * 2, dtype=torch.int32))

    def forward(self, images):
        return self.tied(self.norm(images.flatten(1)))


def build_model():
    return Net()
"""


def with_large_model(asked: TrainRequest) -> TrainRequest:
    (Path(asked.source_folder) / "net.py").write_text(LARGE)
    assert asked.job.model is not None
    return asked


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The launcher's progress events."""
    found: list[dict[str, Any]] = []
    progress.listen(found.append)
    return found


def at_step(step: int, then: Callable[[], object]) -> Callable[[dict[str, Any]], None]:
    """A listener that runs `then` once, when training reaches this step."""
    done = threading.Event()

    def listen(event: dict[str, Any]) -> None:
        if event["event"] == "train" and event["step"] >= step and not done.is_set():
            done.set()
            then()

    return listen


def notices(events: list[dict[str, Any]], words: str) -> list[str]:
    return [
        event["message"]
        for event in events
        if event["event"] == "notice" and words in event["message"]
    ]


def in_s3(asked: TrainRequest, name: str) -> tuple[TrainRequest, ObjectStore]:
    uri = f"s3://faults/{name}"
    return asked.model_copy(update={"run_uri": uri}), open_store(uri, doors.settings())


def losses(store: ObjectStore, rank: int) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in read_rows(store, f"steps-rank{rank}")]


def undisturbed(folder: Path, **settings: Any) -> tuple[TrainRequest, ObjectStore]:
    """The same training without faults."""
    asked = request(folder, [40, 20], **settings)
    train(asked)
    return asked, asked.store()


@pytest.fixture
def server(home: Path) -> Iterator[Path]:
    """A home with an S3 server that the test may stop or kill."""
    start_s3(home)
    yield home
    for process in s3_service(home).processes():
        process.resume()


@pytest.mark.parametrize("how", ["killed", pytest.param("stopped", marks=pytest.mark.slow)])
def test_a_store_outage_during_training_costs_no_step_and_checkpoints_are_uploaded_later(
    server: Path, tmp_path: Path, events: list[dict[str, Any]], how: str
) -> None:
    settings: dict[str, Any] = {
        "devices": SLOW,
        "epochs": 4,
        "checkpoint": {"every_steps": 6, "keep_last": 2},
    }
    asked, store = in_s3(request(tmp_path / "case", [40, 20], **settings), how)
    stopped = list[psutil.Process]()

    def away() -> None:
        if how == "killed":
            stop([s3_service(server)], grace_s=0)
            return
        stopped.extend(s3_service(server).processes())
        for process in stopped:
            process.suspend()
        threading.Timer(ANSWER_S + 4, back).start()  # training ends earlier, then waits

    def back() -> None:
        for process in stopped:
            process.resume()
        if how == "killed":
            start_s3(server)

    progress.listen(at_step(20, away))
    if how == "killed":
        progress.listen(at_step(70, lambda: threading.Thread(target=back).start()))
    result = train(asked)
    assert result.steps == 96
    assert notices(events, "until it is back")
    assert notices(events, "the store is back")
    _, expected = undisturbed(tmp_path / "undisturbed", **settings)
    for rank in (0, 1):
        assert losses(store, rank) == losses(expected, rank)
    states, wanted = files.list_states(store), files.list_states(expected)
    assert states[-1].step == 96
    assert [state.step for state in states if state.best][-1:] == [
        state.step for state in wanted if state.best
    ][-1:]
    assert files.whole_model(store, states[-1]) == files.whole_model(expected, wanted[-1])
    assert not list((tmp_path / "case/work/spill").rglob("*.safetensors"))


def without_store(server: Path, how: str) -> Callable[[], object]:
    """Kill the server (it refuses connections) or stop it (it hangs); returns its restart."""
    if how == "killed":
        stop([s3_service(server)], grace_s=0)
        return lambda: start_s3(server)
    processes = s3_service(server).processes()
    for process in processes:
        process.suspend()
    return lambda: [process.resume() for process in processes]


@pytest.mark.slow
def test_while_the_store_hangs_a_better_checkpoint_replaces_the_pending_best(
    server: Path, tmp_path: Path, events: list[dict[str, Any]]
) -> None:
    settings: dict[str, Any] = {
        "devices": SLOW,
        "epochs": 8,
        "target": {"metric": "loss", "value": 0.1},  # so each epoch is the best so far
        "checkpoint": {"every_steps": 500, "keep_last": 1},
    }
    asked, store = in_s3(request(tmp_path / "case", [40, 20], **settings), "best")
    bring_back = list[Callable[[], object]]()
    progress.listen(at_step(60, lambda: bring_back.append(without_store(server, "stopped"))))
    progress.listen(at_step(150, lambda: bring_back[0]()))
    train(asked)
    assert notices(events, "the checkpoint of step 96 is skipped in favour of step 120")
    _, expected = undisturbed(tmp_path / "undisturbed", **settings)
    assert [(one.step, one.best) for one in files.list_states(store)] == [
        (one.step, one.best) for one in files.list_states(expected)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("ended_by", ["patience", "a stop"])
def test_a_store_outage_at_the_end_is_reported_and_the_next_start_uploads_the_rest(
    server: Path, tmp_path: Path, events: list[dict[str, Any]], ended_by: str
) -> None:
    settings: dict[str, Any] = {
        "devices": SLOW,
        "epochs": 3,
        "checkpoint": {"every_steps": 6, "keep_last": 2},
    }
    asked, store = in_s3(request(tmp_path / "case", [40, 20], **settings), "end")
    halt = threading.Event()
    if ended_by == "patience":
        asked = asked.model_copy(update={"store_patience_s": 1.0})

    def stop_waiting(event: dict[str, Any]) -> None:
        if "waits for the store" in event.get("message", ""):
            halt.set()

    progress.listen(at_step(20, lambda: stop([s3_service(server)], grace_s=0)))
    if ended_by == "a stop":
        progress.listen(stop_waiting)
    with pytest.raises(
        ServiceUnreachable,
        match=r"can't be reached.*kept in .*/spill/.*: start again on this machine",
    ):
        train(asked, stop=halt)
    assert halt.is_set() == (ended_by == "a stop")
    assert ranks() == {}
    with pytest.raises(ServiceUnreachable):
        train(asked)
    start_s3(server)
    result = train(asked)
    assert notices(events, "uploaded checkpoints staged")
    assert result.resumed_from_step == 72
    _, expected = undisturbed(tmp_path / "undisturbed", **settings)
    for rank in (0, 1):
        assert losses(store, rank) == losses(expected, rank)
    newest, wanted = files.list_states(store)[-1], files.list_states(expected)[-1]
    assert files.whole_model(store, newest) == files.whole_model(expected, wanted)


@pytest.mark.slow
def test_training_waits_only_once_for_a_store_that_hangs_at_the_end(
    server: Path, tmp_path: Path, events: list[dict[str, Any]]
) -> None:
    settings: dict[str, Any] = {
        "devices": SLOW,
        "epochs": 3,
        "checkpoint": {"every_steps": 6},
        **NO_SPARE,
    }
    asked, _ = in_s3(request(tmp_path / "case", [40, 20], **settings), "hangs")
    asked = asked.model_copy(update={"store_patience_s": 1.0})
    timers = list[threading.Timer]()

    def away() -> None:  # back so late that only a second wait would succeed
        timers.append(threading.Timer(90, without_store(server, "stopped")))
        timers[0].start()

    progress.listen(at_step(20, away))
    with pytest.raises(ServiceUnreachable, match="start again on this machine"):
        train(asked)
    timers[0].cancel()
    assert notices(events, "logs, events or the last checkpoint could not be stored")


@pytest.mark.slow
def test_checkpoints_for_a_full_store_are_spilled_to_disk_and_uploaded_once_there_is_room(
    tmp_path: Path, events: list[dict[str, Any]]
) -> None:
    small = tmp_path / "case/run"
    small.mkdir(parents=True)
    mounted = (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(small)], check=False
        ).returncode
        == 0
    )
    if not mounted:
        pytest.skip("mounting a small file system needs root")
    try:
        asked = request(
            tmp_path / "case", [40, 20], devices=SLOW, epochs=10, checkpoint={"every_steps": 6}
        )
        filler = small / "filler"

        def fill() -> None:
            with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(b"0" * 4096)

        progress.listen(at_step(20, fill))
        progress.listen(at_step(140, filler.unlink))
        result = train(asked)
        assert any("No space left" in message for message in notices(events, "until it is back"))
        assert notices(events, "the store is back")
        assert result.steps == 240
        assert [step for step, _ in losses(asked.store(), 1)] == list(range(240))
        assert files.list_states(asked.store())[-1].step == 240
        assert not list(small.rglob(".part-*"))
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def limit_files(size: int, of: str = "launcher") -> None:
    """Limit the file size that these processes may write (RLIMIT_FSIZE)."""
    for process in ranks().values() if of == "ranks" else [psutil.Process()]:
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@pytest.fixture
def no_limit_left() -> Iterator[None]:
    yield
    limit_files(resource.RLIM_INFINITY)


@pytest.mark.slow
@pytest.mark.usefixtures("no_limit_left")
def test_if_no_disk_has_room_for_a_checkpoint_training_continues_and_keeps_the_last_good_one(
    tmp_path: Path, events: list[dict[str, Any]]
) -> None:
    asked = with_large_model(
        request(
            tmp_path,
            [40, 20],
            devices=SLOW,
            epochs=3,
            checkpoint={"every_steps": 12, "keep_best": False, "keep_last": 9},
        )
    )
    progress.listen(at_step(14, lambda: limit_files(20_000_000, "ranks")))
    progress.listen(at_step(40, lambda: limit_files(resource.RLIM_INFINITY, "ranks")))
    result = train(asked)
    assert len(notices(events, "was not saved; the previous checkpoint remains the newest")) == 1
    steps = [state.step for state in files.list_states(asked.store())]
    assert 24 not in steps
    assert steps[-1] == result.steps == 72
    assert [step for step, _ in losses(asked.store(), 1)] == list(range(72))
    for state in files.list_states(asked.store()):
        files.whole_model(asked.store(), state)
    assert not list(tmp_path.rglob(".part-*"))


@pytest.mark.slow
@pytest.mark.usefixtures("no_limit_left")
# A busy machine may not have saved the checkpoint of step 24 when the limit begins.
@pytest.mark.parametrize(("of", "resumes"), [("launcher", (48,)), ("ranks", (20, 24))])
def test_if_no_disk_has_room_for_the_last_checkpoint_training_fails_and_resumes_from_the_newest(
    tmp_path: Path, of: str, resumes: tuple[int, ...]
) -> None:
    asked = with_large_model(
        request(tmp_path, [40, 20], devices=SLOW, epochs=2, checkpoint={"every_steps": 20})
    ).model_copy(update={"store_patience_s": 1.0})
    with (
        progress.listening(at_step(30, lambda: limit_files(20_000_000, of))),
        pytest.raises(
            ServiceUnreachable,
            match=r"the checkpoint of step 48 could not be stored: .*File too large",
        ),
    ):
        train(asked)
    limit_files(resource.RLIM_INFINITY)
    assert train(asked).resumed_from_step in resumes  # the newest on this machine
    assert files.list_states(asked.store())[-1].step == 48


def test_a_large_checkpoint_is_sharded_and_fewer_ranks_can_resume_from_it(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"epochs": 2, "checkpoint": {"every_steps": 20}, **NO_SPARE}
    first, asked = (
        with_large_model(
            request(
                tmp_path,
                sizes,
                devices=[{"type": "emulated", "speed": 1.0}] * len(sizes),
                **settings,
            )
        )
        for sizes in ([30, 20, 10], [35, 25])
    )
    halt = threading.Event()

    def listener(event: dict[str, Any]) -> None:
        if event["event"] == "checkpoint":  # this one exists, whether or not the last one does
            halt.set()

    with progress.listening(listener), pytest.raises(Interrupted):
        train(first, stop=halt)
    kept = files.list_states(first.store())[-1]
    assert all(name.endswith("-of-00003.safetensors") for name in kept.sha256)
    assert train(asked).resumed_from_step == kept.step
    newest = files.list_states(asked.store())[-1]
    assert all(name.endswith("-of-00002.safetensors") for name in newest.sha256)
    found = load(files.whole_model(asked.store(), newest))
    expected = alone(asked)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].shape == value.shape
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_checkpoint_with_a_damaged_shard_is_skipped_for_the_one_before(tmp_path: Path) -> None:
    asked = with_large_model(
        request(tmp_path, [40, 20], devices=SLOW, checkpoint={"every_steps": 12}, **NO_SPARE)
    )
    expected = train(asked)
    newest, before = files.list_states(asked.store())[-1], files.list_states(asked.store())[-2]
    shard = tmp_path / "run" / files.folder_name(newest.step) / sorted(newest.sha256)[-1]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(bytes(data))
    again = train(asked)
    assert again.resumed_from_step == before.step
    assert again.metrics == expected.metrics


@pytest.mark.slow
def test_a_rank_killed_while_the_store_hangs_costs_no_checkpoint(
    server: Path, tmp_path: Path, events: list[dict[str, Any]]
) -> None:
    settings: dict[str, Any] = {
        "devices": SLOW,
        "epochs": 4,
        "checkpoint": {"every_steps": 12, "keep_last": 99},
    }
    asked, store = in_s3(request(tmp_path / "case", [40, 20], **settings), "mid-write")
    hung = list[psutil.Process]()

    def hang() -> None:
        hung.extend(s3_service(server).processes())
        for process in hung:
            process.suspend()

    def resume() -> None:
        for process in hung:
            process.resume()

    def kill() -> None:
        ranks()[0].kill()
        threading.Timer(3, resume).start()

    progress.listen(at_step(30, hang))
    progress.listen(at_step(45, kill))
    result = train(asked)
    assert result.steps == 96
    assert "was killed by SIGKILL; continues with 1 of 2" in result.split_events[0].reason
    kept = files.list_states(store)
    assert {state.step for state in kept} >= {12, 24, 36, 96}
    for state in kept:
        files.whole_model(store, state)
    by_rank = [read_rows(store, f"steps-rank{rank}") for rank in (0, 1)]
    for own in by_rank:
        assert len({row["step"] for row in own}) == len(own)
    samples = [
        sum(row["batch_size"] for own in by_rank for row in own if row["epoch"] == epoch)
        for epoch in range(4)
    ]
    assert len(set(samples)) == 1
    assert sorted({row["step"] for own in by_rank for row in own}) == list(range(96))
    assert [row["epoch"] for row in read_rows(store, "epochs")] == list(range(4))
    _, expected = undisturbed(tmp_path / "undisturbed", **settings)
    assert losses(store, 1)[:45] == losses(expected, 1)[:45]


def test_a_launch_fails_and_adds_nothing_after_another_has_taken_over(
    tmp_path: Path, events: list[dict[str, Any]]
) -> None:
    asked = request(
        tmp_path,
        [40, 20],
        devices=SLOW,
        epochs=20,
        checkpoint={"every_steps": 12, "keep_best": False},
    )
    before: list[int] = []

    def take_over() -> None:
        claim(asked.store(), 7)
        before.extend(state.step for state in files.list_states(asked.store()))

    progress.listen(at_step(30, take_over))
    with pytest.raises(RunHeld, match="taken over"):
        train(asked, token=5)
    assert ranks() == {}
    assert [state.step for state in files.list_states(asked.store())] == before
    assert all(state.token == 5 for state in files.list_states(asked.store()))
    with pytest.raises(RunHeld, match="later lease"):
        train(asked, token=6)
