"""The command line with a pool of other hosts, from the data to the trained model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import doors
import pytest
from lab import Lab

CNN = Path(__file__).parents[2] / "dags" / "jobs" / "cnn.py"


def cli(*words: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, document and standard error."""
    command = [sys.executable, "-m", "trainwright.tasks.cli.main", *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.slow
def test_a_job_trains_on_the_hosts_of_its_pool(
    tmp_path: Path, home: Path, lab: Callable[..., Lab]
) -> None:
    made = lab(cores=[None, None])
    speeds = (2.0, 1.0)
    (tmp_path / "pool.json").write_text(
        json.dumps(made.pool([[{"type": "emulated", "speed": one}] for one in speeds]))
    )
    job = {
        "name": "hosts",
        "pool": "pool.json",
        "data": {"uri": "builtin:digits"},
        "model": {"source": str(CNN), "config": {"width": 8}},
        "train": {
            "epochs": 1,
            "batch_bounds": [96, 96],
            "learning_rate": 0.003,
            "adaptive_split": False,
        },
        "objective": {"minimize": "time"},
        "devices": {"min_count": 2},
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    code, document, said = cli("train", str(tmp_path / "job.json"))
    assert code == 0, said
    assert document["state"] == "success"
    assert {one["id"] for one in document["devices"]} == {"h1/emulated-0", "h2/emulated-0"}
    assert sum(one["samples"] for one in document["devices"]) == 1438
    logs = {item.key for item in doors.run_at(document["run"]).objects.list("logs/")}
    assert {"logs/rank-0.log", "logs/rank-1.log"} <= logs
    assert [host.words() for host in made.hosts] == [[], []]

    made.known_hosts.write_text("")
    code, document, said = cli("train", str(tmp_path / "job.json"), "--new")
    assert code == 4
    assert "its host key is not in known_hosts" in document["error"]["message"]
    assert said.strip().splitlines()[-1].count("known_hosts") >= 1
