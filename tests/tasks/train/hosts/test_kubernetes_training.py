"""Training in pods: the API server is a fake, and a pod is a process on a host of the lab."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fake_cluster
import pytest
from hosts_case import SLOW, on_hosts, until
from lab import Lab
from training_case import once, request, rows, when_checkpoint, with_min_count

from trainwright.tasks.errors import Interrupted, Preempted
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


def said(heard: list[dict[str, Any]], field: str) -> str:
    return "; ".join(str(event.get(field, "")) for event in list(heard))


def pod_of(cluster: fake_cluster.FakeCluster, host: str) -> str:
    return next(name for name in cluster.jobs if f"-{host}-" in name)


def trains_again(heard: list[dict[str, Any]], count: int) -> bool:
    """Whether both have trained after coming together again so many times."""
    times = 0
    for event in list(heard):
        times += event["event"] == "split" and "continues with 2 of 2" in event["reason"]
        if times == count and event["event"] == "train":
            return True
    return False


def test_a_preempted_training_saves_waits_and_ends_with_the_same_losses_as_on_this_machine(
    tmp_path: Path, lab: Callable[..., Lab], heard: list[dict[str, Any]]
) -> None:
    """It needs both hosts, of which a pod with a higher priority takes one."""
    made = lab(cores=[None, None])
    options: dict[str, Any] = {"backend": "torch", "checkpoint": {"every_steps": 1000}}
    local = request(tmp_path / "local", [40, 20], epochs=4, **options)
    train(local)
    heard.clear()
    with fake_cluster.running(tmp_path / "cluster", placed(made)) as cluster:
        away = in_pods(tmp_path / "away", made, cluster, SLOW, epochs=4, **options)
        away = with_min_count(away, 2)

        def preempt() -> None:
            cluster.schedules = False
            cluster.evict(pod_of(cluster, "h2"))

        first = once(lambda: "'step': 5" in str(heard), preempt)
        with pytest.raises(Preempted, match=r"takes back the host of rank 1 .*step \d+ is kept"):
            train(away)
        first.join()
        assert cluster.jobs == {}
        then = once(lambda: "waits for its pod" in said(heard, "message"), cluster.schedule)
        result = train(away.model_copy(update={"resume": True}))
        then.join()
        assert [device.image for device in result.devices] == [IMAGE, IMAGE]
        assert losses(away) == losses(local)
        assert cluster.jobs == {}
        assert [one["kind"] for one in cluster.created].count("Job") == 4
    assert until(lambda: not any(host.words() for host in made.hosts))


def test_a_pod_that_is_evicted_or_exceeds_its_memory_is_asked_for_again(
    tmp_path: Path,
    lab: Callable[..., Lab],
    heard: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reconnect, "TRY_EVERY_S", 0.5)
    made = lab(cores=[None, None])
    stop = threading.Event()
    with fake_cluster.running(tmp_path / "cluster", placed(made)) as cluster:
        asked = in_pods(tmp_path / "run", made, cluster, SLOW, backend="torch", epochs=400)
        watchers = [
            when_checkpoint(tmp_path / "run", 5, lambda: cluster.evict(pod_of(cluster, "h2"))),
            once(
                lambda: trains_again(heard, 1),
                lambda: cluster.exceed_memory(pod_of(cluster, "h2")),
            ),
            once(lambda: trains_again(heard, 2), stop.set),
        ]
        with pytest.raises(Interrupted, match="its checkpoint is kept"):
            train(asked, stop=stop)
        for one in watchers:
            one.join()
        assert cluster.jobs == {}
    reasons = said(heard, "reason")
    assert "rank 1 (h2/cpu) was given back to the cluster; continues with 1 of 2" in reasons
    assert "ended: was killed for lack of memory (OOMKilled)" in reasons
    assert re.search(r"ran out of memory with a batch of \d+; its batch is now limited to", reasons)
    steps = [row["step"] for row in rows(asked, "steps-rank0")]
    assert steps == list(range(len(steps)))
