"""Training in pods: the API server is a fake, and a pod is a process on a host of the lab."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fake_cluster
import pytest
from hosts_case import FAST, SLOW, on_hosts, until
from lab import Lab
from training_case import once, request, rows, when_checkpoint

from trainwright.tasks.errors import Interrupted
from trainwright.tasks.train import TrainRequest, train
from trainwright.tasks.train.hosts import reconnect

pytestmark = pytest.mark.slow
IMAGE = f"registry.example/train@sha256:{'0' * 64}"


def losses(asked: TrainRequest) -> list[float]:
    return [row["loss"] for row in rows(asked, "steps-rank0")]


def placed(made: Lab) -> Callable[[str, Sequence[str]], list[str]]:
    """Runs a container's words on the lab's host of that name, with its network and files."""
    hosts = {host.name: host for host in made.hosts}
    return lambda name, words: hosts[name].inside(*words)


def in_pods(
    folder: Path, made: Lab, cluster: fake_cluster.FakeCluster, device: dict[str, Any], **more: Any
) -> TrainRequest:
    """A training on the lab's hosts, which the cluster gives."""
    asked = on_hosts(folder, made, [40, 20], device, **more)
    path = Path(str(asked.job.pool))
    pool = json.loads(path.read_text())
    del pool["ssh"]
    for host in pool["hosts"]:
        host["address"] = host["name"]
    where = {"namespace": "lab", "image": IMAGE, "api": cluster.url, "address": made.driver}
    path.write_text(json.dumps({**pool, "engine": "kubernetes", "kubernetes": where}))
    devices = [
        one.model_copy(update={"address": one.host, "engine": "kubernetes"})
        for one in asked.plan.devices
    ]
    plan = asked.plan.model_copy(update={"devices": devices})
    return asked.model_copy(update={"plan": plan})


def test_pods_reach_the_same_losses_as_this_machine(
    tmp_path: Path, lab: Callable[..., Lab]
) -> None:
    made = lab(cores=[None, None])
    local = request(tmp_path / "local", [40, 20], backend="torch")
    train(local)
    with fake_cluster.running(tmp_path / "cluster", placed(made)) as cluster:
        away = in_pods(tmp_path / "away", made, cluster, FAST, backend="torch")
        result = train(away)
        assert [device.image for device in result.devices] == [IMAGE, IMAGE]
        assert losses(away) == losses(local)
        assert cluster.jobs == {}
        assert [one["kind"] for one in cluster.created].count("Job") == 2
    assert until(lambda: not any(host.words() for host in made.hosts))


def test_an_evicted_pod_is_asked_for_again_and_joins(
    tmp_path: Path,
    lab: Callable[..., Lab],
    heard: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reconnect, "TRY_EVERY_S", 0.5)
    made = lab(cores=[None, None])
    stop = threading.Event()

    def back() -> bool:
        return any("continues with 2 of 2" in event.get("reason", "") for event in heard)

    with fake_cluster.running(tmp_path / "cluster", placed(made)) as cluster:
        asked = in_pods(tmp_path / "run", made, cluster, SLOW, backend="torch", epochs=400)
        second = lambda: next(name for name in cluster.jobs if "-h2-" in name)  # noqa: E731
        first = when_checkpoint(tmp_path / "run", 5, lambda: cluster.evict(second()))
        then = once(back, stop.set)
        with pytest.raises(Interrupted, match="its checkpoint is kept"):
            train(asked, stop=stop)
        first.join()
        then.join()
        assert cluster.jobs == {}
    splits = [event["reason"] for event in heard if event["event"] == "split"]
    assert splits[0].startswith("rank 1 (h2/cpu) is lost:")
    steps = [row["step"] for row in rows(asked, "steps-rank0")]
    assert steps == list(range(len(steps)))
