"""Training over ssh on hosts of a lab: the same losses as here, and one clear line for whatever is wrong with a host."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from lab import Lab
from training_case import assert_every_sample_once, once, request, rows, when_checkpoint

from trainwright.infra.s3 import S3Access, s3_service, start_s3
from trainwright.infra.service import stop as stop_service
from trainwright.tasks import progress
from trainwright.tasks.errors import BadInput, Interrupted, ServiceUnreachable, TrainingFailed
from trainwright.tasks.objects import open_store
from trainwright.tasks.train import TrainRequest, session, train
from trainwright.tasks.train.checkpoint import list_states
from trainwright.tasks.train.metrics import read_rows
from trainwright.tasks.train.node import BEAT_S

FAST = {"type": "emulated", "speed": 1e6}
SLOW = {"type": "emulated", "speed": 1.0}


def on_hosts(
    folder: Path, made: Lab, batch_sizes: list[int], device: dict[str, Any] = FAST, *, here: int = 0, **wanted: Any
) -> TrainRequest:
    """A training with one such device on each host; the first `here` ranks are on this machine."""
    places = [{"host": "here", "address": "localhost", "id": f"here/{n}"} for n in range(here)]
    places += [{"host": host.name, "address": host.address, "id": f"{host.name}/cpu"} for host in made.hosts]
    asked = request(folder, batch_sizes, devices=[{**device, **place} for place in places], **wanted)
    entries = [[{"type": "emulated", "speed": device["speed"]}]] * len(made.hosts)
    (folder / "pool.json").write_text(json.dumps(made.pool(entries)))
    return asked


def losses(asked: TrainRequest, rank: int = 0) -> list[float]:
    return [row["loss"] for row in rows(asked, f"steps-rank{rank}")]


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What is said about progress while the test runs."""
    events: list[dict[str, Any]] = []
    monkeypatch.setattr(progress, "_listeners", [events.append])
    return events


@pytest.mark.parametrize("backend", ["horovod", pytest.param("torch", marks=pytest.mark.slow)])
def test_hosts_reach_the_same_losses_as_this_machine(backend: str, tmp_path: Path, lab: Callable[..., Lab]) -> None:
    made = lab()
    split: dict[str, Any] = {"backend": backend, "model": {"norm": True, "dropout": 0.2}}
    local = request(tmp_path / "local", [60, 40, 20], **split)
    expected = train(local)
    away = on_hosts(tmp_path / "away", made, [60, 40, 20], **split)
    result = train(away)
    assert losses(away) == losses(local)
    assert result.metrics == expected.metrics
    assert [losses(away, rank) for rank in (1, 2)] == [losses(local, rank) for rank in (1, 2)]
    logs = tmp_path / "away" / "run" / "logs"
    assert sorted(path.name for path in logs.glob("rank-*.log")) == ["rank-0.log", "rank-1.log", "rank-2.log"]
    assert any((tmp_path / "away" / "run" / "events").iterdir())
    for host in made.hosts:
        assert host.words() == []


@pytest.mark.slow
def test_this_machine_trains_with_hosts_over_a_slow_link(tmp_path: Path, lab: Callable[..., Lab]) -> None:
    made = lab(cores=[None], rate="100mbit")
    local = request(tmp_path / "local", [40, 20])
    train(local)
    mixed = on_hosts(tmp_path / "mixed", made, [40, 20], here=1)
    train(mixed)
    assert losses(mixed) == losses(local)


def test_a_host_that_does_not_answer_is_named(tmp_path: Path, lab: Callable[..., Lab]) -> None:
    made = lab(cores=[None])
    asked = on_hosts(tmp_path, made, [40, 20], here=1)
    nobody = made.driver.rpartition(".")[0] + ".250"
    plan = json.loads(asked.plan.model_dump_json().replace(made.hosts[0].address, nobody))
    asked = asked.model_copy(update={"plan": type(asked.plan).model_validate(plan)})
    with pytest.raises(ServiceUnreachable, match=rf"host h1 \({nobody}\): .*(No route|timed out)"):
        train(asked)
    assert not list(tmp_path.glob("run/metrics/*"))


def test_a_host_with_another_key_or_an_unknown_one_is_refused(tmp_path: Path, lab: Callable[..., Lab]) -> None:
    made = lab(cores=[None, None])
    asked = on_hosts(tmp_path, made, [40, 20])
    first, second = made.known_hosts.read_text().splitlines()
    wrong = f"{first}\n{second.split()[0]} {first.split(maxsplit=1)[1]}\n"
    made.known_hosts.write_text(wrong)
    with pytest.raises(ServiceUnreachable, match=r"host h2 \(.*\): its host key is not the one in known_hosts"):
        train(asked)
    assert made.known_hosts.read_text() == wrong
    made.known_hosts.write_text(first + "\n")
    with pytest.raises(ServiceUnreachable, match=r"host h2 \(.*\): its host key is not in known_hosts"):
        train(asked)
    assert made.known_hosts.read_text() == first + "\n"
    assert [host.words() for host in made.hosts] == [[], []]


def act(made: Lab, number: int, program: str, instead: str) -> None:
    """On this host, these words of sh are run in the place of one of our programs."""
    python = made.hosts[number].python
    python.write_text(python.read_text().replace("exec ", f'case "$*" in *{program}*) {instead} ;; esac\nexec ', 1))


@pytest.mark.parametrize(
    ("says", "why"),
    [
        ('{"kind": "journal", "rank": "../../../evil", "text": "evil", "anew": true}', "journal: rank 1 named"),
        pytest.param(
            '{"kind": "journal", "rank": 2, "text": "evil", "anew": true}',
            "allowed: a rank, 0 to 1",
            marks=pytest.mark.slow,
        ),
        pytest.param("{}", "KeyError", marks=pytest.mark.slow),
    ],
)
def test_a_host_that_says_what_no_rank_may_say_is_given_up(
    says: str, why: str, tmp_path: Path, lab: Callable[..., Lab]
) -> None:
    made = lab(cores=[None, None])
    asked = on_hosts(tmp_path, made, [40, 20])
    (tmp_path / "says").write_text(says + "\n")
    act(made, 1, "train.worker", f"cat {tmp_path}/says >&$TRAINWRIGHT_CHANNEL; exec sleep 600")
    train(asked)  # by the other
    assert why in (tmp_path / "work" / "logs" / "rank-1.log").read_text()
    assert not [path for path in tmp_path.rglob("*") if "evil" in path.name or path.name == "steps-rank2.jsonl"]
    assert [host.words() for host in made.hosts] == [[], []]


def test_a_host_whose_node_is_stopped_is_given_up_after_a_silence(
    tmp_path: Path, lab: Callable[..., Lab], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "SILENCE_S", 2 * BEAT_S)
    made = lab(cores=[None, None])
    asked = on_hosts(tmp_path, made, [40, 20])
    act(made, 1, "train.preload", "kill -STOP $PPID; exec sleep 600")
    with pytest.raises(TrainingFailed, match=r"host h2 \(.*it said nothing for 10 s"):
        train(asked)


def test_a_stop_is_heeded_while_a_host_brings_its_data(tmp_path: Path, lab: Callable[..., Lab]) -> None:
    made = lab(cores=[None, None])
    asked = on_hosts(tmp_path, made, [40, 20])
    act(made, 1, "train.preload", "exec sleep 600")
    stop = threading.Event()
    watcher = once(lambda: any("sleep" in line for line in made.hosts[1].words()), stop.set)
    with pytest.raises(Interrupted, match="stopped before the first step"):
        train(asked, stop=stop)
    watcher.join()
    assert until(lambda: [host.words() for host in made.hosts] == [[], []], seconds=10)


def table(path: Path, rows: int = 400) -> str:
    """A csv file of two classes."""
    lines = [
        f"{n % 7},{n % 11},{'long' * 50 if n == 0 else n % 13},{'yes' if n % 7 > 3 else 'no'}" for n in range(1, rows)
    ]
    path.write_text("\n".join(["a,b,c,label", *lines]) + "\n")
    return str(path)


def images(folder: Path) -> str:
    """A folder of images of two classes."""
    import numpy as np
    from PIL import Image

    (folder / "sub").mkdir(parents=True)
    rows = ["file,label"]
    for n in range(120):
        name = f"sub/{n}.png"
        Image.fromarray(np.full((1, 3), n * 2, dtype=np.uint8)).save(folder / name)
        rows.append(f"{name},{'yes' if n > 60 else 'no'}")
    (folder / "index.csv").write_text("\n".join(rows) + "\n")
    return str(folder)


LINEAR = """import torch


def build_model():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3, 2))
"""


def with_data(asked: TrainRequest, uri: str) -> TrainRequest:
    """The same training of a linear model on a table."""
    from trainwright.tasks import data

    (Path(asked.source_folder) / "net.py").write_text(LINEAR)
    assert asked.job.model is not None
    spec = asked.job.data.model_copy(update={"uri": uri})
    model = asked.job.model.model_copy(update={"config": {}})
    job = asked.job.model_copy(update={"data": spec, "model": model})
    return asked.model_copy(update={"job": job, "schema_": data.describe(spec)})


@pytest.mark.parametrize("make", [table, pytest.param(images, marks=pytest.mark.slow)])
def test_data_that_hosts_lack_is_copied_there_once(
    make: Callable[[Path], str], tmp_path: Path, lab: Callable[..., Lab], heard: list[dict[str, Any]]
) -> None:
    made = lab(cores=[None, None])
    uri = make(made.private / "table.csv")  # here; the hosts' folder of that name is their own
    asked = with_data(on_hosts(tmp_path, made, [40, 20]), uri)
    train(asked)
    copied = {(one["host"], one["bytes"] == one["of"]) for one in heard if one["event"] == "preload"}
    assert {("h1", True), ("h2", True)} <= copied
    heard.clear()
    train(asked.model_copy(update={"resume": False}))
    assert not [one for one in heard if one["event"] == "preload"]


def test_data_missing_on_one_host_is_told_with_the_host_and_its_uri(tmp_path: Path, lab: Callable[..., Lab]) -> None:
    made = lab(cores=[None, None], private_size="512k")
    uri = table(made.private / "table.csv", rows=9000)
    asked = with_data(on_hosts(tmp_path, made, [40, 20]), uri)
    fill = f"head -c 460k /dev/zero > {made.private}/full"
    subprocess.run(made.hosts[1].inside("sh", "-c", fill), check=True)
    with pytest.raises(BadInput, match=rf"{uri} is missing.*host h2 \(.*No space left"):
        train(asked)
    assert [host.words() for host in made.hosts] == [[], []]


class Doorkeeper(socketserver.ThreadingTCPServer):
    """Passes connections from these addresses on to another server, and ends those of others."""

    allow_reuse_address = daemon_threads = True

    def __init__(self, address: str, target: tuple[str, int], welcome: set[str]) -> None:
        self.target, self.welcome = target, welcome
        super().__init__((address, 0), Passage)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return client_address[0] in self.welcome


class Passage(socketserver.BaseRequestHandler):
    server: Doorkeeper

    def handle(self) -> None:
        with socket.create_connection(self.server.target) as behind:
            back = threading.Thread(target=self._pump, args=(behind, self.request), daemon=True)
            back.start()
            self._pump(self.request, behind)
            back.join()

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


@pytest.mark.slow
def test_hosts_fetch_what_lies_in_s3_and_one_that_can_not_is_told(
    tmp_path: Path, lab: Callable[..., Lab], s3: S3Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = lab(cores=[None, None])
    first, second = (host.address for host in made.hosts)
    target = ("127.0.0.1", urlsplit(s3.endpoint).port or 0)
    open_store("s3://hosts").put_file("data/table.csv", Path(table(tmp_path / "table.csv")))
    with Doorkeeper(made.driver, target, {made.driver, first, second}) as door:
        threading.Thread(target=door.serve_forever, daemon=True).start()
        monkeypatch.setenv("TRAINWRIGHT_S3_ENDPOINT", f"http://{made.driver}:{door.server_address[1]}")
        asked = with_data(on_hosts(tmp_path, made, [40, 20]), "s3://hosts/data/table.csv")
        train(asked)
        open_store("s3://hosts").put_file("data/table.csv", Path(table(tmp_path / "table.csv", rows=500)))
        asked = with_data(asked, "s3://hosts/data/table.csv")
        door.welcome.remove(second)
        with pytest.raises(ServiceUnreachable, match=r"host h2 \(.*\): s3://hosts/data/table.csv is missing there: "):
            train(asked.model_copy(update={"resume": False}))
        door.shutdown()
    for path in (*tmp_path.rglob("*"), *made.folder.rglob("*")):
        if path.is_file():
            assert s3.secret_key.encode() not in path.read_bytes()


def test_a_host_that_runs_other_sources_is_told(tmp_path: Path, lab: Callable[..., Lab]) -> None:
    made = lab(cores=[None, None])
    asked = on_hosts(tmp_path, made, [40, 20])
    here = Path(train.__code__.co_filename).parents[2]
    there = tmp_path / "there" / "trainwright"
    for package in ("tasks", "estimator", "infra"):
        shutil.copytree(here / package, there / package, ignore=shutil.ignore_patterns("__pycache__"))
    with (there / "tasks" / "train" / "batches.py").open("a") as file:
        file.write("# another\n")
    python = made.hosts[1].python
    python.write_text(python.read_text().replace("exec ", f"export PYTHONPATH={there.parent}\nexec "))
    with pytest.raises(BadInput, match=r"host h2 \(.*\): trainwright's sources: sha256 \w+… here, \w+… there"):
        train(asked)
    python.write_text('#!/bin/sh\nexec /nowhere/python "$@"\n')
    with pytest.raises(ServiceUnreachable, match=r"host h2 \(.*\): .*can't be run there"):
        train(asked)


def until(condition: Callable[[], bool], seconds: float = 120) -> bool:
    """Whether it comes true in this time."""
    for _ in range(int(seconds / 0.1)):
        if condition():
            return True
        time.sleep(0.1)
    return condition()


def test_hosts_are_left_empty_when_the_launcher_is_killed(tmp_path: Path, lab: Callable[..., Lab]) -> None:
    made = lab(cores=[None, None])
    asked = on_hosts(tmp_path, made, [40, 20], SLOW, epochs=100)
    (tmp_path / "request.json").write_text(asked.model_dump_json(by_alias=True))
    code = (
        "import sys; from pathlib import Path; from trainwright.tasks.train import TrainRequest, train; "
        "train(TrainRequest.model_validate_json(Path(sys.argv[1]).read_text()))"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "request.json")], env=os.environ)
    try:
        assert until(lambda: bool(list(tmp_path.glob("run/checkpoints/*/state.json"))))
        assert all(any("train.worker" in line for line in host.words()) for host in made.hosts)
    finally:
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
    assert until(lambda: not any(host.words() for host in made.hosts), seconds=5)
    for host in made.hosts:
        left = subprocess.run(host.inside("ls", str(made.private / "home" / "nodes")), capture_output=True, check=True)
        assert left.stdout == b""


def kill_rank(made: Lab, number: int, signal_number: int = signal.SIGKILL) -> None:
    """Send a signal to the rank of this number, on whichever host it is."""
    for pid in [pid for host in made.hosts for pid in host.pids()]:
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"trainwright.tasks.train.worker" in words and words[-2] == str(number).encode():
                os.kill(pid, signal_number)


@pytest.mark.parametrize(
    ("backend", "victim", "here"),
    [
        ("torch", 0, 0),
        pytest.param("horovod", 0, 0, marks=pytest.mark.slow),
        pytest.param("horovod", 1, 1, marks=pytest.mark.slow),
        pytest.param("torch", 1, 1, marks=pytest.mark.slow),
    ],
)
def test_the_others_go_on_when_a_rank_on_a_host_is_killed_and_it_comes_back(
    backend: str, victim: int, here: int, tmp_path: Path, lab: Callable[..., Lab], heard: list[dict[str, Any]]
) -> None:
    made = lab(cores=[None] * (2 - here))
    asked = on_hosts(tmp_path, made, [40, 20], SLOW, here=here, epochs=400, backend=backend)
    first = when_checkpoint(tmp_path, 5, lambda: kill_rank(made, victim))
    stop = threading.Event()

    def is_back() -> bool:
        return any(event["event"] == "split" and "is back" in event["reason"] for event in heard)

    second = once(is_back, stop.set)
    with pytest.raises(Interrupted, match=r"stopped after step \d+; its checkpoint is kept"):
        train(asked, stop=stop)
    first.join()
    second.join()
    reasons = [event["reason"] for event in heard if event["event"] == "split"]
    name = asked.plan.devices[victim].id
    assert reasons[0] == f"rank {victim} ({name}) was killed by SIGKILL; goes on with 1 of 2"
    assert f"rank {victim} ({name}) is back; goes on with 2 of 2" in reasons
    taken: Counter[int] = Counter()
    for row in [row for rank in (0, 1) for row in rows(asked, f"steps-rank{rank}")]:
        taken[row["step"]] += row["batch_size"]
    full = [taken[step] for step in range(len(taken)) if (step + 1) % 24]  # the last of an epoch takes what is left
    assert set(full) == {60}
    assert sorted(taken) == list(range(len(taken)))


@pytest.mark.slow
def test_the_others_go_on_without_a_host_that_falls_silent(
    tmp_path: Path, lab: Callable[..., Lab], heard: list[dict[str, Any]]
) -> None:
    made = lab(cores=[None, None])
    asked = on_hosts(tmp_path, made, [40, 20], SLOW, epochs=3)
    watcher = when_checkpoint(tmp_path, 5, lambda: made.cut("h2"))
    result = train(asked)
    watcher.join()
    assert re.search(r"rank 1 \(h2/cpu\) is lost: .*host h2.*; goes on with 1 of 2", result.split_events[0].reason)
    assert result.steps == 72
    assert_every_sample_once(asked, 2, 3)


@pytest.mark.slow
def test_a_stopped_rank_on_a_host_counts_as_lost_after_the_stall_timeout(
    tmp_path: Path, lab: Callable[..., Lab]
) -> None:
    made = lab(cores=[None, None])
    asked = on_hosts(tmp_path, made, [40, 20], SLOW, epochs=1, faults={"stall_timeout": "2s"})
    watcher = when_checkpoint(tmp_path, 5, lambda: kill_rank(made, 1, signal.SIGSTOP))
    result = train(asked)
    watcher.join()
    assert "2 s and was killed; goes on with 1 of 2" in result.split_events[0].reason
    assert_every_sample_once(asked, 2, 1)


@pytest.mark.slow
def test_when_all_hosts_lose_their_ranks_training_begins_again_at_the_last_checkpoint(
    tmp_path: Path, lab: Callable[..., Lab]
) -> None:
    made = lab(cores=[None, None])
    asked = on_hosts(tmp_path, made, [40, 20], SLOW, epochs=2, checkpoint={"every_steps": 20})
    watcher = when_checkpoint(tmp_path, 20, lambda: [kill_rank(made, number) for number in (0, 1)])
    assert train(asked).steps == 48
    watcher.join()
    found = assert_every_sample_once(asked, 2, 2)
    quiet = request(tmp_path / "quiet", [40, 20], epochs=2, checkpoint={"every_steps": 20})
    train(quiet)
    assert found[:20] == assert_every_sample_once(quiet, 2, 2)[:20]


@pytest.mark.slow
def test_a_store_that_is_away_costs_hosts_no_step_and_gets_their_checkpoints_afterwards(
    tmp_path: Path, lab: Callable[..., Lab], home: Path, heard: list[dict[str, Any]]
) -> None:
    made = lab(cores=[None, None])
    start_s3(home)
    asked = on_hosts(tmp_path, made, [40, 20], SLOW, epochs=4, checkpoint={"every_steps": 6, "keep_last": 2})
    asked = asked.model_copy(update={"run_uri": "s3://hosts/away"})

    def reached(step: int) -> Callable[[], bool]:
        return lambda: any(event["event"] == "train" and event["step"] >= step for event in heard)

    def break_and_mend() -> None:
        stop_service([s3_service(home)], grace_s=0)
        until(reached(70))
        start_s3(home)

    watcher = once(reached(20), break_and_mend)
    assert train(asked).steps == 96
    watcher.join()
    notices = [event["message"] for event in heard if event["event"] == "notice"]
    assert any(f"checkpoints are kept in {tmp_path / 'work' / 'spill'}" in one for one in notices)
    assert any("the store is back" in one for one in notices)
    store = open_store("s3://hosts/away")
    assert [state.step for state in list_states(store)] == [90, 96]
    for rank in (0, 1):
        assert [row["step"] for row in read_rows(store, f"steps-rank{rank}")] == list(range(96))


def test_a_stop_while_hosts_are_reached_changes_nothing_there(tmp_path: Path, lab: Callable[..., Lab]) -> None:
    made = lab(cores=[None, None])
    stop = threading.Event()
    stop.set()
    with pytest.raises(Interrupted, match="stopped before the first step"):
        train(on_hosts(tmp_path, made, [40, 20]), stop=stop)
    assert until(lambda: [host.words() for host in made.hosts] == [[], []], seconds=10)
    assert not list(tmp_path.glob("run/metrics/*"))


@pytest.mark.slow
def test_a_stop_reaches_the_hosts_and_leaves_a_checkpoint(tmp_path: Path, lab: Callable[..., Lab]) -> None:
    made = lab(cores=[None, None])
    asked = on_hosts(tmp_path, made, [40, 20], SLOW, epochs=100)
    stop = threading.Event()
    watcher = when_checkpoint(tmp_path, 5, stop.set)
    with pytest.raises(Interrupted, match=r"stopped after step \d+; its checkpoint is kept"):
        train(asked, stop=stop)
    watcher.join()
    assert [host.words() for host in made.hosts] == [[], []]
