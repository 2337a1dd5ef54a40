"""Hosts of a Kubernetes cluster. The API server is a fake; the pod's process connects for real."""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_cluster
import pytest
from fake_cluster import FakeCluster
from hosts_case import until
from training_case import planned

from trainwright.infra.process import dying_with_parent
from trainwright.tasks.errors import BadInput, ServiceUnreachable
from trainwright.tasks.settings import Settings
from trainwright.tasks.spec.host_spec import Host
from trainwright.tasks.spec.kubernetes_spec import Kubernetes
from trainwright.tasks.train.hosts.host_engine import HostRequest
from trainwright.tasks.train.hosts.kubernetes import dial_back
from trainwright.tasks.train.hosts.kubernetes.dial_back import connect
from trainwright.tasks.train.hosts.kubernetes.kubernetes_engine import KubernetesEngine

ECHO = ["sh", "-c", 'echo "$TRAINWRIGHT_CAME_BY"; cat; echo ended']


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[FakeCluster]:
    with fake_cluster.running(tmp_path / "cluster") as made:
        yield made


def asked(**host: Any) -> HostRequest:
    devices = planned([{"type": "cpu", "cores": 0.5}, {"type": "nvidia-t4"}], [1, 1]).devices
    fields = {"name": "h1", "address": "h1", "devices": [{"type": "cpu"}], **host}
    return HostRequest(Host.model_validate(fields), tuple(devices), sys.executable)


def spec(cluster: FakeCluster, **fields: Any) -> Kubernetes:
    where = {"namespace": "lab", "image": "train:1", "api": cluster.url, "address": "127.0.0.1"}
    return Kubernetes.model_validate({**where, **fields})


class Relayed:
    """A relay, as a session starts it."""

    def __init__(self, cluster: FakeCluster, words: list[str], **fields: Any) -> None:
        self.engine, self.asked = KubernetesEngine(spec(cluster, **fields), Settings()), asked()
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `end`
        self.process = subprocess.Popen(
            dying_with_parent(self.engine.command(self.asked, words)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            start_new_session=True,
        )

    def line(self) -> bytes:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def say(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def end(self, data: bytes = b"") -> tuple[str, str]:
        """Send the last data; what else came, and the log."""
        out, _ = self.process.communicate(data, timeout=30)
        with self.log:
            self.log.seek(0)
            return out.decode(), self.log.read()


def test_a_pod_connects_and_its_process_is_on_the_stream(cluster: FakeCluster) -> None:
    relayed = Relayed(cluster, ECHO)
    assert relayed.line().split()[0] == b"127.0.0.1"
    assert relayed.engine.standing(relayed.asked).status == "granted"
    long = b"x" * 3_000_000 + b"\n"
    out, log = relayed.end(long)
    assert out == long.decode() + "ended\n"
    assert (log, relayed.process.returncode) == ("", 0)
    relayed.engine.close()
    assert cluster.jobs == {}


def test_the_token_is_in_the_secret_only(cluster: FakeCluster) -> None:
    relayed = Relayed(cluster, ECHO)
    relayed.line()
    job, secret = cluster.created
    token = base64.b64decode(secret["data"]["token"]).decode()
    assert len(token) == 43
    assert token not in json.dumps(job)
    assert secret["metadata"]["ownerReferences"][0]["uid"] == job["metadata"]["uid"]
    words = Path(f"/proc/{relayed.process.pid}/cmdline").read_bytes().decode()
    _, log = relayed.end()
    assert token not in words + log
    relayed.engine.close()


def test_a_connection_without_the_token_is_refused_in_one_line(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    cluster.schedules = False
    relayed = Relayed(cluster, ECHO)
    assert until(lambda: len(cluster.created) == 2)
    data = cluster.created[1]["data"]
    files = {name: base64.b64decode(one) for name, one in data.items()}
    place = json.loads(files["launcher.json"])
    with socket.create_connection((place["address"], place["port"])) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            plain.recv(100)
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    for name, data in {**files, "token": b"a" * 43}.items():
        (wrong / name).write_bytes(data)
    with pytest.raises((OSError, ssl.SSLError)):
        connect(wrong)
    assert relayed.engine.standing(relayed.asked).status == "queued"
    right = tmp_path / "right"
    right.mkdir()
    for name, data in files.items():
        (right / name).write_bytes(data)
    connect(right).close()
    _, log = relayed.end()
    lines = log.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("refused a connection from 127.0.0.1: [SSL")
    assert lines[1] == "refused a connection from 127.0.0.1: wrong token"
    assert "the connection ended" in lines[2]
    relayed.engine.close()


def test_a_pod_that_waits_says_why_and_leaves_nothing_when_the_launcher_is_killed(
    cluster: FakeCluster,
) -> None:
    cluster.schedules = False
    relayed = Relayed(cluster, ECHO)
    assert until(lambda: cluster.jobs != {})
    why = "0/3 nodes are available: 3 Insufficient cpu."
    (pod,) = cluster.pods.values()
    condition = {"type": "PodScheduled", "status": "False", "message": why}
    pod["status"] = {"phase": "Pending", "conditions": [condition]}
    assert until(lambda: relayed.engine.standing(relayed.asked).why == f"for its pod: {why}")
    relayed.process.kill()
    relayed.process.communicate()
    assert until(lambda: cluster.jobs == {}, 10)
    relayed.engine.close()


@pytest.mark.parametrize(
    ("status", "error", "says"),
    [
        (
            {"containerStatuses": [{"state": {"waiting": {"reason": "ErrImagePull"}}}]},
            BadInput,
            "host h1: kubernetes.image: can't be pulled: ErrImagePull",
        ),
        (
            {"phase": "Failed", "reason": "Evicted", "message": "The node was low on memory."},
            ServiceUnreachable,
            "Evicted: The node was low on memory.",
        ),
    ],
)
def test_a_pod_that_can_not_connect_ends_the_request(
    cluster: FakeCluster, status: dict[str, Any], error: type[Exception], says: str
) -> None:
    cluster.schedules = False
    relayed = Relayed(cluster, ECHO)
    assert until(lambda: cluster.pods != {})
    next(iter(cluster.pods.values()))["status"] = status
    _, log = relayed.end()
    why = relayed.engine.why_ended(log, relayed.process.returncode)
    found = relayed.engine.error(relayed.asked, why)
    assert type(found) is error
    assert says in str(found)
    relayed.engine.close()


@pytest.mark.parametrize(
    ("code", "error", "says"),
    [
        (403, ServiceUnreachable, 'answers 403: jobs.batch is forbidden: User "x" cannot create'),
        (404, BadInput, 'kubernetes: namespaces "lab" not found'),
        (None, ServiceUnreachable, "can't be reached: [Errno 111] Connection refused"),
    ],
)
def test_what_the_api_refuses_is_told_in_one_line(
    cluster: FakeCluster, code: int | None, error: type[Exception], says: str
) -> None:
    message = {403: 'jobs.batch is forbidden:\nUser "x" cannot create'}.get(
        code or 0, 'namespaces "lab" not found'
    )
    cluster.answers["POST", "jobs"] = (code or 0, {"message": message})
    relayed = Relayed(cluster, ECHO, **({} if code else {"api": "http://127.0.0.1:9"}))
    _, log = relayed.end()
    found = relayed.engine.error(relayed.asked, relayed.engine.why_ended(log, 1))
    assert type(found) is error
    assert says in str(found)
    assert "\n" not in str(found)


def test_a_request_keeps_its_place_while_the_api_does_not_answer(cluster: FakeCluster) -> None:
    cluster.schedules = False
    cluster.answers["GET", "pods"] = (429, {"message": "too many requests"})
    relayed = Relayed(cluster, ECHO)
    why = "for its pod; the cluster's API does not answer"
    assert until(lambda: relayed.engine.standing(relayed.asked).why == why)
    del cluster.answers["GET", "pods"]
    assert until(lambda: relayed.engine.standing(relayed.asked).why not in ("", why))
    cluster.schedule()
    assert relayed.line().split()[0] == b"127.0.0.1"
    _, log = relayed.end()
    assert log.count("answers 429: too many requests") == 1
    relayed.engine.close()


def test_a_request_ends_if_its_pods_may_not_be_read(cluster: FakeCluster) -> None:
    cluster.schedules = False
    cluster.answers["GET", "pods"] = (403, {"message": "pods is forbidden"})
    relayed = Relayed(cluster, ECHO)
    _, log = relayed.end()
    assert relayed.process.returncode == 1
    assert log.strip().endswith("answers 403: pods is forbidden")
    relayed.engine.close()
    assert cluster.jobs == {}


def test_a_pod_without_its_secret_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dial_back, "_SECRET_WITHIN_S", 0.0)
    monkeypatch.setattr(dial_back, "_TRY_EVERY_S", 0.01)
    with pytest.raises(OSError, match="no Secret of a launcher"):
        connect(tmp_path)


def test_the_process_in_an_evicted_pod_is_told_and_the_connection_stays(
    cluster: FakeCluster,
) -> None:
    """As the launcher needs it for a last checkpoint."""
    code = (
        "import signal, sys; "
        "signal.signal(signal.SIGTERM, lambda *_: print('told', flush=True)); "
        "print('here', flush=True); sys.stdin.read(); print('ended')"
    )
    relayed = Relayed(cluster, [sys.executable, "-c", code])
    assert relayed.line() == b"here\n"
    eviction = threading.Thread(target=cluster.evict, args=(next(iter(cluster.processes)),))
    eviction.start()
    assert relayed.line() == b"told\n"
    out, _ = relayed.end()
    assert out == "ended\n"
    eviction.join()
    relayed.engine.close()
