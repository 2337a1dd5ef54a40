"""Finding devices: this machine for real, GPUs by NVML's names, hosts that do not answer."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from trainwright.tasks.allocate.ledger import Holder
from trainwright.tasks.allocate.queue import Queue
from trainwright.tasks.cli import app
from trainwright.tasks.errors import BadInput, ServiceUnreachable
from trainwright.tasks.pool import load_pool
from trainwright.tasks.probe import device_type, probe
from trainwright.tasks.step import ledger


def test_this_machine_is_found_and_its_pool_file_is_read_back(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "pool.yaml"
    done = CliRunner().invoke(app, ["pool", "probe", "--out", str(out), "--json"])
    assert done.exit_code == 0, done.output
    pool = load_pool(out)
    assert pool == probe([])
    assert pool.hosts[0].devices[0].cores == len(os.sched_getaffinity(0))
    assert yaml.safe_load(out.read_text())["hosts"][0]["address"] == "localhost"


@pytest.mark.parametrize(
    ("name", "gib", "kind"),
    [
        ("NVIDIA A100-SXM4-80GB", 80, "nvidia-a100-80gb"),
        ("NVIDIA A100-PCIE-40GB", 40, "nvidia-a100-40gb"),
        ("NVIDIA A10", 22.5, "nvidia-a10"),
        ("Tesla V100-SXM2-16GB", 16, "nvidia-v100-16gb"),
        ("Tesla T4", 15, "nvidia-t4"),
        ("NVIDIA L4", 22.5, "nvidia-l4"),
        ("NVIDIA L40S", 45, "nvidia-l40s"),
        ("NVIDIA GeForce RTX 4090", 24, "nvidia-rtx4090"),
        ("NVIDIA H100 80GB HBM3", 80, "nvidia-h100-80gb"),
        ("NVIDIA H200", 140, "nvidia-h200"),
        ("Quadro P600", 2, None),
    ],
)
def test_a_gpu_is_known_by_its_name_and_memory(name: str, gib: float, kind: str | None) -> None:
    assert device_type(name, gib * 2**30) == kind


def test_a_host_that_does_not_answer_or_is_no_name_is_told() -> None:
    with pytest.raises(ServiceUnreachable, match=r"host 127\.0\.0\.1: .*known_hosts"):
        probe(["127.0.0.1"])
    with pytest.raises(BadInput, match="--host"):
        probe(["-oProxyCommand=true"])


def test_the_pool_says_until_when_a_device_is_held_and_who_waits(home: Path) -> None:
    device = load_pool(None).devices()[0].resource
    queue = Queue(ledger())
    queue.take("run-1", Holder("alice"), [device])
    queue.look("run-2", Holder("bob"), [device], 1, priority=3)
    done = CliRunner().invoke(app, ["pool", "--json"])
    document = json.loads(done.stdout)
    assert document["devices"][0]["holder"] == "alice"
    assert document["devices"][0]["until"].endswith("+00:00")
    waits = document["queue"]
    assert [(one["place"], one["run"], one["holder"], one["priority"]) for one in waits] == [(1, "run-2", "bob", 3)]
    assert "bob" in CliRunner().invoke(app, ["pool"]).stdout
