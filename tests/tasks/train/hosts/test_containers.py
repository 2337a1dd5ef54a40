"""Training in containers on hosts of a lab, by podman with this machine's root file system."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from container_case import busy_cores, contain, kill_container, touched_bytes
from hosts_case import SLOW, on_hosts, until
from lab import Lab
from training_case import assert_every_sample_once, request, rows, when_checkpoint

from trainwright.tasks.errors import ServiceUnreachable, TrainingFailed
from trainwright.tasks.train import TrainRequest, train

pytestmark = pytest.mark.slow


def losses(asked: TrainRequest, rank: int = 0) -> list[float]:
    return [row["loss"] for row in rows(asked, f"steps-rank{rank}")]


def test_containers_reach_the_same_losses_as_this_machine(
    tmp_path: Path, lab: Callable[..., Lab]
) -> None:
    made = lab(cores=[None, None])
    split: dict[str, Any] = {"backend": "torch", "model": {"norm": True, "dropout": 0.2}}
    local = request(tmp_path / "local", [40, 20], **split)
    train(local)
    away = on_hosts(tmp_path / "away", made, [40, 20], **{**split, "backend": "auto"})
    contain(away, {"image": "/:O", "memory": "3GiB", "cpus": 1.5})
    assert train(away).backend == "torch"  # whether there is a Horovod or not
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


def test_a_container_holds_its_limits_of_cpus_and_memory(lab: Callable[..., Lab]) -> None:
    """At most: a busy machine may give a process less than its quota."""
    made = lab(cores=[None])
    assert 0 < busy_cores(made, 0.2) <= 0.2 * 1.05
    limit = 256 * 2**20
    assert abs(touched_bytes(made, limit) / limit - 1) <= 0.05


def test_out_of_memory_in_a_container_names_the_batch_that_fits(
    tmp_path: Path, lab: Callable[..., Lab]
) -> None:
    made = lab(cores=[None])
    asked = on_hosts(tmp_path, made, [60], backend="torch")
    source = Path(asked.source_folder) / "net.py"
    grows = "    def forward(self, images):\n        torch.ones(len(images), 5 << 20)\n"
    source.write_text(source.read_text().replace("    def forward(self, images):\n", grows))
    contain(asked, {"image": "/:O", "memory": "900MiB"})
    with pytest.raises(TrainingFailed, match=r"--set train.global_batch_size=\d+") as error:
        train(asked)
    assert "the global batch of 60 does not fit into the memory" in str(error.value)
    assert "ran out of memory" in str(error.value)


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
