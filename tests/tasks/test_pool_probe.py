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
from trainwright.tasks.probe import probe
from trainwright.tasks.step import ledger


def test_this_machine_is_found_and_its_pool_file_is_read_back(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "pool.yaml"
    done = CliRunner().invoke(app, ["pool", "probe", "--out", str(out), "--json"])
    assert done.exit_code == 0, done.output
    pool = load_pool(out)
    assert pool == probe([])
    assert pool.hosts[0].devices[0].cores == len(os.sched_getaffinity(0))
    assert yaml.safe_load(out.read_text())["hosts"][0]["address"] == "localhost"


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
