"""The launcher, or all ranks, are killed during an upload: only steps since the newest staged
checkpoint are lost."""

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
from training_case import NO_SPARE, SLOW, assert_every_sample_once, once, ranks, request

from trainwright.tasks import progress
from trainwright.tasks.train import train
from trainwright.tasks.train.checkpoint import staged

EVERY = 5
CHECKPOINTS = {"every_steps": EVERY, "keep_best": False}


@contextmanager
def held_back(run: Path) -> Iterator[None]:
    """Block commits during the block: locks the run folder, so that the index can't be written."""
    descriptor = os.open(run, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(descriptor)


def stored(run: Path) -> int:
    """The newest step in the index."""
    entries = (
        json.loads((run / "checkpoints.json").read_text())["checkpoints"]
        if (run / "checkpoints.json").exists()
        else []
    )
    return max((one["step"] for one in entries), default=0)


def is_staged(work: Path, step: int) -> bool:
    """Whether this checkpoint is staged, and not uploaded yet."""
    return bool(list(work.glob(f"{staged.SPILL}/*/step-{step:08d}-*.json")))


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < until, "the condition did not hold within five minutes"
        time.sleep(0.01)


def killed_during_an_upload(
    folder: Path, step: Callable[[], int], kill: Callable[[], object]
) -> int:
    """Kill while the next checkpoint is being uploaded and another is about to begin; returns the
    former's step."""
    run, work = folder / "run", folder / "work"
    wait_until(lambda: stored(run) >= 2 * EVERY)
    with held_back(run):
        began = stored(run)
        wait_until(lambda: step() >= began + 2 * EVERY - 1 and is_staged(work, began + EVERY))
        kill()
    return began + EVERY


def killed_while_the_store_is_slow(
    folder: Path, processes: Callable[[], dict[int, Any]], began: list[int]
) -> None:
    """Kill all ranks when the store is three checkpoints behind; appends the staged step to
    `began`."""
    run, work = folder / "run", folder / "work"
    wait_until(lambda: stored(run) >= EVERY)
    with held_back(run):
        late, until = stored(run) + 3 * EVERY, time.monotonic() + 300
        while time.monotonic() < until:
            for process in processes().values():
                process.send_signal(signal.SIGSTOP)  # so that none stages a newer one meanwhile
            time.sleep(0.2)  # for the launcher to handle their messages
            if staged_now := [
                step for step in range(late, late + 20 * EVERY, EVERY) if is_staged(work, step)
            ]:
                began.append(staged_now[-1])
                break
            for process in processes().values():
                process.send_signal(signal.SIGCONT)
            time.sleep(0.05)
        for process in processes().values():
            process.send_signal(signal.SIGKILL)


def test_a_killed_launcher_costs_at_most_one_checkpoint_interval(tmp_path: Path) -> None:
    spec: dict[str, Any] = {"epochs": 4, "backend": "torch", "checkpoint": CHECKPOINTS, **NO_SPARE}
    asked = request(tmp_path / "a", [40, 20], devices=SLOW, **spec)
    (tmp_path / "request.json").write_text(asked.model_dump_json(by_alias=True))
    log = tmp_path / "progress"
    log.touch()
    launcher = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from pathlib import Path; from trainwright.tasks import progress;"
            "from trainwright.tasks.train import TrainRequest, train;"
            "progress.listen(progress.appended_to(Path(sys.argv[2])));"
            "train(TrainRequest.model_validate_json(Path(sys.argv[1]).read_text()))",
            str(tmp_path / "request.json"),
            str(log),
        ],
    )

    def step() -> int:
        events = [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]
        return max((event["step"] for event in events if event["event"] == "train"), default=0)

    try:
        begun = killed_during_an_upload(tmp_path / "a", step, launcher.kill)
    finally:
        launcher.kill()
        launcher.wait()
    assert (tmp_path / "a" / "work" / staged.STAGING).readlink().parent == staged.SHARED_MEMORY
    result = train(asked)
    assert result.resumed_from_step is not None
    assert result.resumed_from_step >= begun
    whole = request(tmp_path / "b", [40, 20], **spec)
    train(whole)
    assert assert_every_sample_once(asked, 2, 4) == assert_every_sample_once(whole, 2, 4)
    assert not os.path.lexists(tmp_path / "a" / "work" / staged.STAGING)


@pytest.mark.parametrize("store", ["fast", "slow"])
def test_killing_all_ranks_at_once_costs_at_most_one_checkpoint_interval(
    tmp_path: Path, store: str
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
            begun.append(killed_during_an_upload(tmp_path, step, kill))

    watcher = once(lambda: True, kill_all)
    train(asked)
    watcher.join()
    notice = "all ranks with the training's state were lost; resumes from the checkpoint of step "
    (newest,) = [
        int(event["message"].removeprefix(notice))
        for event in heard
        if event.get("message", "").startswith(notice)
    ]
    assert newest >= begun[0]
    assert_every_sample_once(asked, 2, epochs)
