"""Trainings on the hosts of a lab (`lab`), for the tests of this folder."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab import Lab
from training_case import request

from trainwright.tasks.train import TrainRequest, train

FAST = {"type": "emulated", "speed": 1e6}
SLOW = {"type": "emulated", "speed": 1.0}


def on_hosts(
    folder: Path,
    made: Lab,
    batch_sizes: list[int],
    device: dict[str, Any] = FAST,
    *,
    here: int = 0,
    **wanted: Any,
) -> TrainRequest:
    """A training with one device per host; the first `here` ranks are on this machine."""
    places = [{"host": "here", "address": "localhost", "id": f"here/{n}"} for n in range(here)]
    places += [
        {"host": host.name, "address": host.address, "id": f"{host.name}/cpu"}
        for host in made.hosts
    ]
    asked = request(
        folder, batch_sizes, devices=[{**device, **place} for place in places], **wanted
    )
    entries = [[{"type": "emulated", "speed": device["speed"]}]] * len(made.hosts)
    (folder / "pool.json").write_text(json.dumps(made.pool(entries)))
    return asked


def act(made: Lab, number: int, program: str, instead: str) -> None:
    """Replace one of our programs on this host by a shell command."""
    python = made.hosts[number].python
    python.write_text(
        python.read_text().replace(
            "exec ", f'case "$*" in *{program}*) {instead} ;; esac\nexec ', 1
        )
    )


def other_sources(made: Lab, number: int, folder: Path) -> None:
    """Make this host use other sources, from the folder."""
    here, there = Path(train.__code__.co_filename).parents[3], folder / "there" / "trainwright"
    for package in ("tasks", "estimator", "infra"):
        shutil.copytree(
            here / package, there / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    with (there / "tasks" / "train" / "batches.py").open("a") as file:
        file.write("# another\n")
    python = made.hosts[number].python
    python.write_text(
        python.read_text().replace("exec ", f"export PYTHONPATH={there.parent}\nexec ")
    )


def no_python(made: Lab, number: int) -> None:
    """Make Python fail on this host."""
    made.hosts[number].python.write_text('#!/bin/sh\nexec /nowhere/python "$@"\n')


def until(condition: Callable[[], bool], seconds: float = 120) -> bool:
    """Whether the condition holds within this time."""
    for _ in range(int(seconds / 0.1)):
        if condition():
            return True
        time.sleep(0.1)
    return condition()
