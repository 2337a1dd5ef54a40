"""What clusters say of their nodes does not delay an answer, and is kept for a while."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from trainwright.tasks.errors import BadInput
from trainwright.tasks.service import cluster_states
from trainwright.tasks.service.cluster_states import ClusterStates
from trainwright.tasks.spec.pool import Pool

HOSTS = [{"name": "node", "devices": [{"type": "cpu", "cores": 2}]}]
POOL = Pool.model_validate({"name": "lab", "engine": "slurm", "hosts": HOSTS})


class SlowCluster:
    """Stands for a cluster's command that takes long: it answers when told to."""

    def __init__(self) -> None:
        self.asked, self.answers = 0, threading.Event()

    def __call__(self, pool: Pool) -> dict[str, Any]:
        self.asked += 1
        assert self.answers.wait(60)
        return {"engine": pool.engine, "nodes": [], "unknown": f"answer {self.asked}"}


def test_a_slow_cluster_is_unknown_until_it_answers_and_then_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = SlowCluster()
    states = ClusterStates(cluster)

    async def shown(wait_s: float) -> str:
        monkeypatch.setattr(cluster_states, "WAIT_S", wait_s)
        return str((await states.of("lab", POOL))["unknown"])

    async def story() -> None:
        assert await asyncio.gather(shown(0.0), shown(0.0)) == ["no answer yet"] * 2
        assert await shown(0.0) == "no answer yet"
        cluster.answers.set()
        assert await shown(60.0) == "answer 1"
        assert await shown(60.0) == "answer 1"  # fresh
        cluster.answers.clear()
        monkeypatch.setattr(cluster_states, "_FRESH_S", 0.0)
        assert await shown(0.0) == "answer 1"  # asked again, and silent for now
        monkeypatch.setattr(cluster_states, "_KEPT_S", 0.0)
        assert await shown(0.0) == "no answer yet"
        cluster.answers.set()
        monkeypatch.setattr(cluster_states, "_KEPT_S", 60.0)
        assert await shown(60.0) == "answer 2"

    asyncio.run(story())


def test_wrong_settings_are_said_and_a_fault_is_raised() -> None:
    def wrong(_: Pool) -> dict[str, Any]:
        raise BadInput("TRAINWRIGHT_SLURM_CONFIG: got /none; there is no such file")

    def faulty(_: Pool) -> dict[str, Any]:
        raise KeyError("State")

    state = asyncio.run(ClusterStates(wrong).of("lab", POOL))
    assert state["nodes"] is None
    assert state["unknown"].startswith("TRAINWRIGHT_SLURM_CONFIG")
    with pytest.raises(KeyError):
        asyncio.run(ClusterStates(faulty).of("lab", POOL))
