"""Trainings on the nodes of a Slurm cluster (`slurm_lab`), for the tests of this folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hosts_case import FAST
from slurm_lab import SlurmLab
from training_case import request

from trainwright.tasks.train import TrainRequest


def on_slurm(
    folder: Path,
    cluster: SlurmLab,
    batch_sizes: list[int],
    device: dict[str, Any] = FAST,
    options: dict[str, Any] | None = None,
    **wanted: Any,
) -> TrainRequest:
    """A training with one device on each of as many hosts as there are batch sizes."""
    names = [f"cpu-{number + 1}" for number in range(len(batch_sizes))]
    if len(names) == 1:
        names = ["cpu"]
    places = [
        {"host": one, "address": one, "id": f"{one}/emulated-0", "engine": "slurm", "index": 0}
        for one in names
    ]
    asked = request(
        folder, batch_sizes, devices=[{**device, **place} for place in places], **wanted
    )
    (folder / "pool.json").write_text(
        json.dumps(pool_of(cluster, len(names), device["speed"], options or {}))
    )
    return asked


def pool_of(cluster: SlurmLab, count: int, speed: float, options: dict[str, Any]) -> dict[str, Any]:
    """A pool of so many of the cluster's nodes."""
    return {
        "name": "lab",
        "engine": "slurm",
        "slurm": {"partition": "work", **options},
        "hosts": [
            {
                "name": "cpu",
                "count": count,
                # the same for all nodes: each has a home of its own
                "python": str(cluster.lab.hosts[0].python),
                "devices": [{"type": "emulated", "speed": speed}],
            }
        ],
    }
