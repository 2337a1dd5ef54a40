"""Sums by Horovod in separate processes. (Other files test whole trainings with it.)"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from trainwright.tasks.train.exchange.collective import LEAST_PAUSE_S, HorovodCollective, PeersLost
from trainwright.tasks.train.exchange.rendezvous import horovod_environment, horovod_server
from trainwright.tasks.train.worker_group import WorkerGroup

RANK = """
import os, time
import torch
import horovod.torch as hvd
from trainwright.tasks.train.exchange.collective import HorovodCollective

ranks, done, synchronize = HorovodCollective(), [], hvd.synchronize
ranks.sum_(torch.ones(2), "first")
if ranks.rank == 1:
    time.sleep(2.0)
poll = hvd.poll
hvd.poll = lambda handle: done.append(poll(handle)) or done[-1]
hvd.synchronize = lambda handle: synchronize(handle) if done[-1] else None
started = time.perf_counter()
found = ranks.sum_(torch.full((5,), 1.0 + ranks.rank), "second")
print(found.tolist(), len(done), time.perf_counter() - started, flush=True)
ranks.shutdown()
os._exit(0)
"""


@contextmanager
def group_of(count: int) -> Iterator[WorkerGroup]:
    """A worker group on this machine."""
    server = horovod_server("127.0.0.1", ["localhost"] * count)
    try:
        rendezvous = f"127.0.0.1:{server.server_address[1]}"
        yield WorkerGroup(generation=1, members=list(range(count)), rendezvous=rendezvous)
    finally:
        server.shutdown()
        server.server_close()


def outputs_of(program: str, group: WorkerGroup) -> list[list[str]]:
    """The lines that each of two ranks prints."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **horovod_environment(group, number)},
        )
        for number in range(2)
    ]
    try:
        return [one.communicate(timeout=120)[0].splitlines() for one in ranks]
    finally:
        for one in ranks:
            one.kill()


def test_a_rank_that_waits_for_a_sum_sleeps_between_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("horovod")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with group_of(2) as group:
        outputs = outputs_of(RANK, group)
    for (one,) in outputs:
        assert one.startswith("[3.0, 3.0, 3.0, 3.0, 3.0]")
        polls, took_s = (float(word) for word in one.split("]")[1].split())
        assert 1 <= polls <= 1 + took_s / LEAST_PAUSE_S


UNLIKE = """
import os
import torch
from trainwright.tasks.errors import TrainingFailed
from trainwright.tasks.train.exchange.collective import HorovodCollective

ranks = HorovodCollective()
other = [torch.int64, torch.float64][ranks.rank]
for tensor in (torch.ones(2 + ranks.rank), torch.ones(2, dtype=other)):
    try:
        ranks.sum_(tensor, "sum")
    except TrainingFailed as error:
        print(error.kind, error, flush=True)
os._exit(0)
"""


def test_tensors_of_unlike_shapes_or_types_are_unlike_actions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("horovod")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with group_of(2) as group:
        for shapes, types in outputs_of(UNLIKE, group):
            assert shapes.startswith("unlike_actions Horovod: Mismatched ALLREDUCE tensor shapes")
            assert types.startswith("unlike_actions Horovod: Mismatched data types")


def test_a_failed_horovod_init_raises_peers_lost_and_shuts_horovod_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hvd, calls = pytest.importorskip("horovod.torch"), list[str]()

    def no_group() -> None:
        raise ValueError("Horovod initialization failed.")

    monkeypatch.setattr(hvd, "init", no_group)
    monkeypatch.setattr(hvd, "shutdown", lambda: calls.append("shutdown"))
    with pytest.raises(PeersLost, match="initialization failed"):
        HorovodCollective()
    assert calls == ["shutdown"]
