"""A run continues after its pool has changed. Real steps, a real training, a changed pool file."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import doors
import pytest
from pydantic import BaseModel

from trainwright.estimator.structure import Structure
from trainwright.tasks import progress
from trainwright.tasks.allocate import acquire
from trainwright.tasks.errors import BadInput, Infeasible, Interrupted, TrainingFailed
from trainwright.tasks.leases.ledger import Holder
from trainwright.tasks.leases.queue import Queue
from trainwright.tasks.runs.artefacts.estimate import Estimate
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.runs.artefacts.training_result import Result
from trainwright.tasks.runs.artefacts.validation import Validation
from trainwright.tasks.runs.run import Run
from trainwright.tasks.spec.job import Job
from trainwright.tasks.spec.pool import load_pool
from trainwright.tasks.train.checkpoint import files
from trainwright.tasks.train.record.live import happened
from trainwright.tasks.train.record.metrics import read_rows

ME = Holder("me")
MODEL = """
import torch


def build_model():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
"""


def write_pool(folder: Path, *cores: float, **more: Any) -> Path:
    """A pool of one host with devices of these numbers of cores."""
    devices = [{"type": "emulated", "speed": 100.0 * value} for value in cores]
    path = folder / "pool.json"
    hosts = [{"name": "here", "address": "localhost", "devices": devices}]
    path.write_text(json.dumps({"name": "p", "hosts": hosts, **more}))
    return path


def make(folder: Path, **fields: Any) -> Job:
    (folder / "net.py").write_text(MODEL)
    values = {
        "name": "case",
        "pool": str(write_pool(folder, 1.0, 1.0)),
        "data": {"uri": "builtin:digits"},
        "model": {"source": str(folder / "net.py")},
        "objective": {"minimize": "time"},
        "train": {
            "epochs": 40,
            "global_batch_size": 64,
            "learning_rate": 0.01,
            "backend": "torch",
            "checkpoint": {"every_steps": 5},
            "adaptive_split": False,
        },
        "devices": {"min_count": 2},
        **fields,
    }
    return Job.model_validate(values)


@pytest.fixture(scope="module")
def known(stack: Path, tmp_path_factory: pytest.TempPathFactory) -> list[BaseModel]:
    """The validation and the structure, which are the same for all jobs of this file."""
    folder = tmp_path_factory.mktemp("known")
    run = opened(make(folder), folder)
    doors.do(run, "extract")
    doors.ledger().release(run.uri)
    return [run.read(Validation), run.read(Structure)]


def opened(job: Job, folder: Path, known: Sequence[BaseModel] = (), **options: Any) -> Run:
    run = doors.open_for(job, ME, store=(folder / "store").as_uri(), **options)
    for one in known:
        run.write(one)
    return run


def test_a_training_continues_without_a_device_that_left_the_pool(
    stack: Path, tmp_path: Path, known: list[BaseModel]
) -> None:
    job = make(tmp_path, devices={"min_count": 1, "ids": []})
    run = opened(job, tmp_path, known)
    doors.do(run, "allocate")
    first = run.read(Plan)

    def stop_at_a_checkpoint() -> None:
        while not files.list_states(run.objects):
            time.sleep(0.05)
        stop.set()

    stop = threading.Event()
    watcher = threading.Thread(target=stop_at_a_checkpoint, daemon=True)
    watcher.start()
    with pytest.raises(Interrupted):
        doors.do(run, "train", stop=stop)
    watcher.join()
    doors.ledger().release(run.uri)
    used = first.devices[0]
    # another device in the first one's place
    cores = (1.0 if device.id != used.id else 0.25 for device in first.devices)
    write_pool(tmp_path, *cores, 1.0)

    again = opened(job, tmp_path)
    assert again.uri == run.uri
    doors.do(again, "train")
    second, result = again.read(Plan), again.read(Result)
    assert (used.id, used.speed) not in {(device.id, device.speed) for device in second.devices}
    assert second.global_batch_size == first.global_batch_size
    assert result.resumed_from_step
    assert {device.id for device in result.devices} == {device.id for device in second.devices}
    doors.ledger().release(again.uri)  # or the next test waits until the lease expires


def ask_to_replan(run: Run) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "trainwright.tasks.cli.main",
        "replan",
        run.id,
        "--store",
        run.store_uri,
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize(
    ("affordable", "asks"), [(True, 1), (False, 1), pytest.param(True, 2, marks=pytest.mark.slow)]
)
def test_a_replanned_training_takes_a_new_device_if_it_is_affordable(
    stack: Path,
    tmp_path: Path,
    known: list[BaseModel],
    monkeypatch: pytest.MonkeyPatch,
    affordable: bool,
    asks: int,
) -> None:
    """Two concurrent requests may cause two replans, if the second comes after the first one."""
    monkeypatch.setattr(acquire, "TTL_S", 6.0)
    job = make(tmp_path, devices={"min_count": 1}, objective={"minimize": "time", "budget": 1000.0})
    job = job.model_copy(update={"train": job.train.model_copy(update={"epochs": 4000})})
    write_pool(tmp_path, 0.02, prices={"emulated": "1/h"})
    run = opened(job, tmp_path, known)
    doors.do(run, "allocate")
    heard: list[dict[str, Any]] = []

    def hear(event: dict[str, Any]) -> None:
        """Request a replan at the first checkpoint; stop at the first one of the second plan."""
        heard.append(event)
        launches = [one["event"] for one in heard].count("ranks")
        if (
            event["event"] == "checkpoint"
            and launches == 1
            and not asked.is_alive()
            and asked.ident is None
        ):
            asked.start()
        if event["event"] == "checkpoint" and launches >= 2 and len(answers) == asks:
            stop.set()

    def ask() -> None:
        write_pool(tmp_path, 0.02, 0.02, prices={"emulated": "1/h" if affordable else "1000000/h"})
        with ThreadPoolExecutor(asks) as pool:
            answers.extend(pool.map(ask_to_replan, [run] * asks))

    answers: list[dict[str, Any]] = []
    stop = threading.Event()
    asked = threading.Thread(target=ask)
    with progress.listening(hear), pytest.raises(Interrupted):
        doors.do(run, "train", stop=stop)
    asked.join()
    assert {answer["run"] for answer in answers} == {run.uri}
    assert min(answer["devices"] for answer in answers) == 1  # in the answer to the first request
    assert len(answers) == asks
    plan = run.read(Plan)
    assert len(plan.devices) == (2 if affordable else 1)
    assert plan.global_batch_size == 64
    assert {one.resource for one in doors.ledger().held("device ")} == set(plan.resources(""))
    taken: Counter[int] = Counter()
    for rank in range(len(plan.devices)):
        for row in read_rows(run.objects, f"steps-rank{rank}"):
            taken[row["step"]] += row["batch_size"]
    assert sorted(taken) == list(range(len(taken)))
    # the last batch of an epoch has the remaining rows
    assert {taken[step] for step in taken if (step + 1) % plan.steps_per_epoch} == {64}
    splits = [
        (event["batch_sizes"], event["reason"]) for event in heard if event["event"] == "split"
    ]
    assert splits == ([([32, 32], "another plan; begins with 2 of 2")] if affordable else [])
    said = [str(event.get("message", "")) for event in heard]
    assert any(line.startswith("replan requested; stopped after step") for line in said)
    stays = any(
        line.startswith("plan: unchanged: plan: for the same global batch of 64") for line in said
    )
    assert stays is not affordable
    noted = happened(run, running=False)
    assert [
        str(event.get("message", "")).startswith("replan requested; stopped after")
        for event in noted
    ].count(True) == 1
    saved = [
        [event["step"] for event in of if event["event"] == "checkpoint"] for of in (noted, heard)
    ]
    assert saved[0] == saved[1]
    doors.ledger().release(run.uri)


@pytest.mark.parametrize("stays", [True, False])
def test_a_waiting_run_takes_a_new_kind_of_device_in_the_pool(
    stack: Path, tmp_path: Path, known: list[BaseModel], stays: bool
) -> None:
    job = make(tmp_path, devices={"min_count": 1, "ids": []})
    write_pool(tmp_path, 1.0)
    run = opened(job, tmp_path, known)
    doors.do(run, "estimate")
    (held,) = load_pool(job.pool).devices()
    queue, stop = Queue(doors.ledger()), threading.Event()
    token = queue.take("other", Holder("other"), [held.resource])
    assert token is not None
    try:
        waiter = threading.Thread(target=lambda: doors.do(run, "allocate", stop=stop), daemon=True)
        waiter.start()
        while not queue.waiting():
            time.sleep(0.05)
        devices = [{"type": "emulated", "speed": 100.0}, {"type": "emulated", "speed": 70.0}]
        hosts = [
            {"name": "other" if not stays else "here", "devices": devices if stays else devices[1:]}
        ]
        (tmp_path / "pool.json").write_text(json.dumps({"name": "p", "hosts": hosts}))
        waiter.join(timeout=60)
        assert [device.speed for device in run.read(Plan).devices] == [70.0]
        assert 70.0 in {curve.speed for curve in run.read(Estimate).curves}
        assert queue.waiting() == []
    finally:
        stop.set()
        doors.ledger().release("other", token=token)
        doors.ledger().release(run.uri)


NARROW = """
import torch


class Net(torch.nn.Sequential):
    def forward(self, images):
        if self.training and len(images) > MOST:
            raise MemoryError
        return super().forward(images)


def build_model():
    return Net(torch.nn.Flatten(), torch.nn.Linear(64, 10))
"""


def test_if_the_planned_batches_do_not_fit_in_memory_gradients_are_accumulated(
    stack: Path, tmp_path: Path, known: list[BaseModel]
) -> None:
    job = make(tmp_path)
    job = job.model_copy(update={"train": job.train.model_copy(update={"epochs": 1})})
    (tmp_path / "net.py").write_text(NARROW.replace("MOST", "20"))
    run, heard = opened(job, tmp_path, known), list[dict[str, Any]]()
    with progress.listening(heard.append):
        doors.do(run, "allocate")
        doors.do(run, "train")
    doors.ledger().release(run.uri)
    messages = [
        event["message"]
        for event in heard
        if event["event"] == "notice" and "planning again with" in event["message"]
    ]
    assert len(messages) == 1
    assert "the global batch of 64 does not fit into the memory of 2 of 2 devices" in messages[0]
    plan, result = run.read(Plan), run.read(Result)
    assert plan.accumulation == 2
    assert plan.global_batch_size == 64
    assert {curve.most_batch_size for curve in run.read(Estimate).curves} == {16}
    assert result.steps == plan.steps_per_epoch
    assert sum(device.samples for device in result.devices) == run.read(Validation).data.train_rows


def test_if_no_device_holds_one_sample_the_error_names_the_device_and_that_no_plan_is_feasible(
    stack: Path, tmp_path: Path, known: list[BaseModel]
) -> None:
    job = make(tmp_path)
    job = job.model_copy(update={"train": job.train.model_copy(update={"global_batch_size": 4})})
    (tmp_path / "net.py").write_text(NARROW.replace("MOST", "0"))
    run = opened(job, tmp_path, known)
    doors.do(run, "allocate")
    said = (
        r"rank \d \(here/emulated-\d\) ran out of memory with a batch of 2; "
        r".*no feasible plan: memory binds.*hold 0 at once"
    )
    with pytest.raises(TrainingFailed, match=said):
        doors.do(run, "train")
    doors.ledger().release(run.uri)


def test_if_no_other_plan_is_feasible_the_error_names_the_missing_devices(
    stack: Path, tmp_path: Path, known: list[BaseModel]
) -> None:
    job = make(tmp_path, objective={"minimize": "time", "deadline": "1h"})
    run = opened(job, tmp_path, known)
    doors.do(run, "allocate")
    doors.ledger().release(run.uri)
    write_pool(tmp_path, 1.0)
    with pytest.raises(BadInput, match=r"devices.min_count: got 2; pool p has 1 device"):
        opened(job, tmp_path)
    write_pool(tmp_path, 1e-7, 1e-7)
    with pytest.raises(
        Infeasible, match=r"no longer has here/\S+, .*same global batch of 64"
    ) as caught:
        doors.do(opened(job, tmp_path), "allocate")
    assert caught.value.exit_code == 3


def test_a_replay_is_not_replanned(stack: Path, tmp_path: Path, known: list[BaseModel]) -> None:
    job = make(tmp_path)
    run = opened(job, tmp_path, known)
    doors.do(run, "allocate")
    doors.ledger().release(run.uri)
    write_pool(tmp_path, 0.5, 0.5)
    again = opened(job, tmp_path, known, new=True)
    with pytest.raises(BadInput, match="--replay: its plan uses here/"):
        doors.do(again, "allocate", run.uri)
