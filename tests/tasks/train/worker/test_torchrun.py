"""The worker under torchrun: it trains like a launcher's ranks, and refuses a run in training."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import doors
import psutil
import pytest
from training_case import once, request, rows

from trainwright.tasks.leases.launch_right import resource
from trainwright.tasks.leases.ledger import Holder, Ledger
from trainwright.tasks.runs.artefacts.run_status import Status
from trainwright.tasks.runs.run_state import shown_state
from trainwright.tasks.storage.folder import FolderStore
from trainwright.tasks.train import TrainRequest, train
from trainwright.tasks.train.checkpoint.fence import claim, folder_name, read_index
from trainwright.tasks.train.checkpoint.files import parsed
from trainwright.tasks.train.checkpoint.staged import StagingArea, part_name
from trainwright.tasks.train.record.journal import segment_path

SLOW = {"type": "emulated", "speed": 1.0}


def command(asked: TrainRequest, processes: int, stale: str = "") -> list[str]:
    """The torchrun command for this many ranks, with the order of this request's training."""
    path = Path(asked.work_folder) / "order.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    words = {
        "request": json.loads(asked.model_dump_json(by_alias=True)),
        "mode": "train",
        "backend": "horovod",
    }
    path.write_text(json.dumps({**words, "started_at_s": time.time() - 3600, "launch": stale}))
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(processes),
    ]
    return [*torchrun, "-m", "trainwright.tasks.train.worker.entry", str(path)]


def run(asked: TrainRequest, processes: int, stale: str = "") -> subprocess.CompletedProcess[str]:
    words = command(asked, processes, stale)
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)


def losses(asked: TrainRequest) -> list[float]:
    return [row["loss"] for row in rows(asked, "steps-rank0")]


@pytest.mark.slow
def test_torchrun_starts_the_same_worker(tmp_path: Path, home: Path) -> None:
    asked = request(tmp_path / "torchrun", [40, 20], backend="torch")
    local = request(tmp_path / "local", [40, 20], backend="torch")
    train(local)
    left = claim(asked.store(), None).owner
    claim(asked.store(), None)  # another launch has claimed the run since
    done = run(asked, 2, left)
    assert done.returncode == 0, done.stderr[-2000:]
    assert losses(asked) == losses(local)
    kinds = [json.loads(line)["kind"] for line in done.stdout.splitlines() if line.startswith("{")]
    assert kinds.count("done") == 2
    assert Ledger(doors.settings().ledger_url).held() == []
    refused = run(asked, 1)
    assert refused.returncode != 0
    assert "WORLD_SIZE: got 1; allowed: 2" in refused.stdout


@pytest.mark.slow
def test_under_torchrun_a_hung_rank_ends_all_after_the_stall_timeout_and_they_resume(
    tmp_path: Path, home: Path
) -> None:
    faults = {"stall_timeout": "2s"}
    asked = request(
        tmp_path, [40, 20], backend="torch", devices=[SLOW] * 2, epochs=4, faults=faults
    )
    asked = asked.model_copy(update={"resume": True})

    def hang() -> None:
        ours = [
            one
            for one in psutil.process_iter(["cmdline", "environ"])
            if asked.work_folder in str(one.info["cmdline"])
        ]
        next(one for one in ours if (one.info["environ"] or {}).get("RANK") == "1").suspend()

    watcher = once(lambda: bool(list(tmp_path.glob("run/checkpoints/*/state.json"))), hang)
    words = command(asked, 2)
    words.insert(words.index("--standalone"), "--max-restarts=1")
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    watcher.join()
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[:1500]
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert "other ranks were lost" in next(
        one["error"]["message"] for one in said if one["kind"] == "error"
    )
    assert [row["step"] for row in rows(asked, "steps-rank0")] == list(range(96))


def test_torchrun_uploads_checkpoints_kept_on_this_machine_and_resumes_from_them(
    tmp_path: Path, home: Path
) -> None:
    train(request(tmp_path, [40], backend="torch"))
    store = FolderStore(tmp_path / "run")
    index = json.loads(store.get("checkpoints.json"))
    newest = folder_name(index["checkpoints"].pop()["step"])
    store.put("checkpoints.json", json.dumps(index).encode())
    area = StagingArea(tmp_path / "work", index["owner"])
    state = parsed((tmp_path / "run" / newest / "state.json").read_bytes())
    paths = [str(area.disk / part_name(1, state.step) / name) for name in state.sha256]
    shutil.move(tmp_path / "run" / newest, Path(paths[0]).parent)
    area.stage(part_name(1, state.step), state, paths)
    asked = request(tmp_path, [40], backend="torch", epochs=2)
    before = [
        row["compute_s"] for row in rows(asked, "steps-rank0")
    ]  # to detect steps that are trained again
    done = run(asked, 1)
    assert done.returncode == 0, done.stderr[-2000:]
    after = rows(asked, "steps-rank0")
    assert [row["step"] for row in after] == list(range(72))
    assert [row["compute_s"] for row in after[: len(before)]] == before
    assert not (tmp_path / "work/spill").exists()
    assert not os.path.lexists(tmp_path / "work/staging")


@pytest.mark.parametrize("words", [[], ["nowhere/order.json"]])
def test_without_an_order_the_worker_names_its_arguments(words: list[str]) -> None:
    environment = os.environ | {"TORCHELASTIC_RUN_ID": "none", "RANK": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "trainwright.tasks.train.worker.entry", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=environment,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"ORDER.json: got {''.join(words) or 'nothing'}; allowed: the order.json in the work "
        "folder of a training"
    ]


@pytest.mark.parametrize("what", ["launcher", pytest.param("hold", marks=pytest.mark.slow)])
def test_torchrun_refuses_a_run_that_another_process_trains_or_holds(
    what: str, tmp_path: Path, home: Path
) -> None:
    uri = (tmp_path / "runs" / "case" / "20260101T000001Z-abcdef").as_uri()
    asked = request(tmp_path / "case", [40], backend="torch").model_copy(update={"run_uri": uri})
    mine = claim(asked.store(), 7)
    journal = segment_path(Path(asked.work_folder), 0, 0)
    journal.parent.mkdir(parents=True)
    journal.write_text("{}\n")
    held = resource(uri) if what == "launcher" else f"{tmp_path.as_uri()}/runs/case"
    Ledger(doors.settings().ledger_url).take([held], Holder("another", os.getpid()), uri)
    done = run(asked, 1, mine.owner)
    assert done.returncode == 1
    report: dict[str, Any] = next(
        json.loads(line) for line in done.stdout.splitlines() if '"error"' in line
    )
    assert report["error"]["kind"] == "held"
    assert "RunHeld" not in done.stderr
    assert f"{held} is held by another" in report["error"]["message"]
    assert read_index(asked.store())[0].owner == mine.owner
    assert journal.read_text() == "{}\n"


def test_torchrun_holds_the_run_during_training_and_stops_if_it_loses_the_lease(
    tmp_path: Path, home: Path
) -> None:
    trained = doors.run_at((tmp_path / "runs" / "case" / "20260101T000001Z-abcdef").as_uri())
    times = dict.fromkeys(("started_at", "updated_at"), "2026-01-01")
    trained.write(Status(state="interrupted", step="train", holder="me", **times))
    places = {"run_uri": trained.uri, "work_folder": str(trained.work_folder())}
    asked = request(tmp_path, [40], backend="torch", devices=[SLOW], epochs=400).model_copy(
        update=places
    )
    ledger, holders, states = Ledger(doors.settings().ledger_url), list[str](), list[str]()

    def take_away() -> None:
        holders.extend(lease.holder for lease in ledger.held(resource(trained.uri)))
        states.append(shown_state(trained, trained.status()))
        ledger.release(trained.uri)

    watcher = once(
        lambda: bool(list(tmp_path.glob("runs/case/*/checkpoints/*/state.json"))), take_away
    )
    done = run(asked, 1)
    watcher.join()
    states.append(shown_state(trained, trained.status()))
    assert states == ["running", "interrupted"]
    assert trained.status().holder == "me"
    assert [holder.split()[0] for holder in holders] == ["launcher"]
    assert done.returncode == 1
    assert "another process took over the right to train this run" in done.stdout
