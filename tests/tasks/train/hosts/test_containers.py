"""Training in containers on hosts of a lab, by podman with this machine's root file system."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hosts_case import SLOW, on_hosts, until
from lab import Lab
from training_case import assert_every_sample_once, request, rows, when_checkpoint

from trainwright.tasks.errors import ServiceUnreachable
from trainwright.tasks.train import TrainRequest, train

pytestmark = pytest.mark.slow


def contain(asked: TrainRequest, container: dict[str, Any]) -> None:
    """Have the hosts of a training's pool file run their processes in containers."""
    path = Path(str(asked.job.pool))
    pool = json.loads(path.read_text())
    pool["container"] = container
    for host in pool["hosts"]:
        host["python"] = sys.executable
    path.write_text(json.dumps(pool))


def losses(asked: TrainRequest, rank: int = 0) -> list[float]:
    return [row["loss"] for row in rows(asked, f"steps-rank{rank}")]


def kill_container(made: Lab, number: int) -> None:
    """Kill the container on a host, as podman names it to its monitor (conmon)."""
    host = made.hosts[number]
    words = [line.split() for line in host.words() if "/conmon " in line]
    assert words, host.words()
    name = words[0][words[0].index("-c") + 1]
    settings = f"CONTAINERS_CONF={made.folder}/containers.conf"
    subprocess.run(host.inside("env", settings, "podman", "kill", name), check=True)


def test_containers_reach_the_same_losses_as_this_machine(
    tmp_path: Path, lab: Callable[..., Lab]
) -> None:
    made = lab(cores=[None, None])
    split: dict[str, Any] = {"backend": "torch", "model": {"norm": True, "dropout": 0.2}}
    local = request(tmp_path / "local", [40, 20], **split)
    train(local)
    away = on_hosts(tmp_path / "away", made, [40, 20], **split)
    contain(away, {"image": "/:O", "memory": "3GiB", "cpus": 1.5})
    train(away)
    assert losses(away) == losses(local)
    assert until(lambda: not any(host.words() for host in made.hosts))


def test_a_training_continues_when_a_container_is_killed(
    tmp_path: Path, lab: Callable[..., Lab]
) -> None:
    made = lab(cores=[None, None])
    asked = on_hosts(tmp_path, made, [40, 20], SLOW, backend="torch", epochs=6)
    contain(asked, {"image": "/:O"})

    killer = when_checkpoint(tmp_path, 10, lambda: kill_container(made, 1))
    train(asked)
    killer.join()
    assert_every_sample_once(asked, 2, 6)


def test_an_image_that_is_not_there_is_told_in_one_line(
    tmp_path: Path, lab: Callable[..., Lab]
) -> None:
    made = lab(cores=[None])
    asked = on_hosts(tmp_path, made, [60], backend="torch")
    contain(asked, {"image": "localhost/absent:1"})
    with pytest.raises(ServiceUnreachable, match="can't run localhost/absent:1 there") as error:
        train(asked)
    assert "\n" not in str(error.value)
    assert re.search(r"image not known|no such image", str(error.value))
