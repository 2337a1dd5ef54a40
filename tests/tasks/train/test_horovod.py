"""Sums by Horovod, in processes of their own. (Trainings by it are in the other files.)"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from trainwright.tasks.train.rendezvous import rendezvous
from trainwright.tasks.train.world import World, horovod_environment

RANK = """
import os, sys, time
import torch
from trainwright.tasks.train.collective import HorovodCollective

ranks = HorovodCollective()
ranks.sum_(torch.ones(3), "first")
if ranks.rank == 1:
    time.sleep(2.0)
before = time.thread_time()
found = ranks.sum_(torch.full((5,), 1.0 + ranks.rank), "second")
print(found.tolist(), time.thread_time() - before, ranks.wait_s, flush=True)
ranks.shutdown()
os._exit(0)
"""


LEFT_ALONE = """
import json, os, sys
import torch
from trainwright.tasks.train.collective import HorovodCollective, PeersLost

try:
    HorovodCollective()
except PeersLost as error:
    print(error, flush=True)
os.environ.update(json.loads(sys.argv[1]))
print(HorovodCollective().sum_(torch.ones(2), "alone").tolist(), flush=True)
os._exit(0)
"""


@contextmanager
def world_of(count: int) -> Iterator[list[dict[str, str]]]:
    """What each rank of a world reads."""
    server = rendezvous("127.0.0.1", ["localhost"] * count)
    world = World(generation=1, members=list(range(count)), meeting=f"127.0.0.1:{server.server_address[1]}")
    try:
        yield [horovod_environment(world, number) for number in range(count)]
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("horovod")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def rank(code: str, environment: dict[str, str], *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *words], stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )


def test_who_waits_for_a_sum_leaves_the_core_to_others() -> None:
    with world_of(2) as world:
        ranks = [rank(RANK, environment) for environment in world]
        said = [one.communicate(timeout=120)[0].strip() for one in ranks]
    for one in said:
        assert one.startswith("[3.0, 3.0, 3.0, 3.0, 3.0]")
    cpu_s, waited_s = (float(one) for one in said[0].split("]")[1].split())
    assert waited_s > 1.0
    assert cpu_s < waited_s / 4


def test_a_rank_that_does_not_come_is_lost_to_the_others_who_may_meet_without_it() -> None:
    with world_of(2) as (first, _), world_of(1) as (alone,):
        only = rank(LEFT_ALONE, {**first, "HOROVOD_GLOO_TIMEOUT_SECONDS": "3"}, json.dumps(alone))
        said = only.communicate(timeout=120)[0].splitlines()
    assert only.returncode == 0
    assert said[0].startswith("Horovod: ")
    assert said[-1] == "[1.0, 1.0]"
