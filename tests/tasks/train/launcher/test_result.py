"""A result's devices: those that were left out, and those of an earlier plan."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from training_case import NO_SPARE, ROWS, planned, request

from trainwright.estimator.predict.energy import datasheet_power
from trainwright.tasks import progress
from trainwright.tasks.errors import Interrupted
from trainwright.tasks.runs.artefacts.training_result import Result
from trainwright.tasks.train import train

NO_MEMORY = """
import os
import torch


class Net(torch.nn.Sequential):
    def forward(self, images):
        if self.training and os.environ.get("HOROVOD_RANK") == "1":
            raise MemoryError
        return super().forward(images)


def build_model():
    return Net(torch.nn.Flatten(), torch.nn.Linear(64, 10))
"""


def test_a_device_too_small_for_one_sample_is_left_out_and_the_others_finish(
    tmp_path: Path,
) -> None:
    asked = request(tmp_path, [40, 1], backend="torch")
    (tmp_path / "source" / "net.py").write_text(NO_MEMORY)
    result = train(asked)
    assert [(device.batch_size, device.samples) for device in result.devices] == [
        (41, ROWS),
        (0, 0),
    ]
    assert all(device.peak_memory_bytes > 1e8 for device in result.devices)


def replanned(tmp_path: Path, pool: dict[str, Any]) -> tuple[Result, int]:
    """A training with a new plan after this step; each device's own work counts."""
    first = [
        {"type": "emulated", "speed": speed, "id": f"here/emulated-{n}"}
        for n, speed in enumerate((2.0, 1.0))
    ]
    asked = request(tmp_path, [40, 20], devices=first, backend="torch", epochs=4, **NO_SPARE)
    (tmp_path / "pool.json").write_text(json.dumps(pool))
    stop = threading.Event()

    def hear(event: dict[str, Any]) -> None:
        if event["event"] == "train" and event["step"] >= 40:
            stop.set()

    with progress.listening(hear), pytest.raises(Interrupted):
        train(asked, stop=stop)
    before = int(max((tmp_path / "run/checkpoints").glob("step-*")).name.removeprefix("step-"))
    plan = planned([{"type": "emulated", "speed": 1e6, "id": "here/emulated-2"}], [60])
    result = train(asked.model_copy(update={"plan": plan}))
    epochs, steps = divmod(before, 24)  # steps of 60 samples, the last of an epoch of 58
    [device] = result.devices
    assert (device.id, result.steps) == ("here/emulated-2", 96)
    assert device.samples == 4 * ROWS - (epochs * ROWS + 60 * steps)
    return result, before


def test_energy_and_cost_include_the_devices_of_an_earlier_plan_while_they_were_held(
    tmp_path: Path, heard: list[dict[str, Any]]
) -> None:
    devices = [{"type": "emulated", "speed": speed} for speed in (2.0, 1.0, 1e6)]
    prices = {"emulated": "3600/h"}  # 1 per second for which a device is held
    result, before = replanned(
        tmp_path, {"name": "p", "hosts": [{"name": "here", "devices": devices}], "prices": prices}
    )
    parts = (2 * before + 96 - before) / 96
    assert result.measured.cost == pytest.approx(parts * result.measured.duration_s, rel=1e-6)
    assert result.measured.energy_source == "datasheet"
    idle = datasheet_power("emulated").idle_w
    assert result.measured.energy_j is not None
    assert result.measured.energy_j > 2 * idle * before / 96 * result.measured.duration_s
    assert not [event for event in heard if "no longer in the pool" in event.get("message", "")]


def test_a_notice_names_devices_of_an_earlier_plan_that_left_the_pool(
    tmp_path: Path, heard: list[dict[str, Any]]
) -> None:
    replanned(tmp_path, {"name": "p", "hosts": [{"name": "here", "devices": [{"type": "cpu"}]}]})
    [said] = [
        event["message"] for event in heard if "no longer in the pool" in event.get("message", "")
    ]
    assert said == "energy and cost exclude here/emulated-0, here/emulated-1: no longer in the pool"


SHOWS_ENVIRONMENT = """
import os
import torch


def build_model(folder):
    with open(f"{folder}/environment-{os.getpid()}", "w") as file:
        print(*os.environ.items(), sep="\\n", file=file)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
"""


def test_the_users_model_finds_no_credentials_in_the_environment_of_its_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("S3_SECRET_KEY", "S3_ACCESS_KEY", "LEDGER", "SERVICE_TOKEN", "SSH_IDENTITY"):
        monkeypatch.setenv(f"TRAINWRIGHT_{name}", "hunter2")
    asked = request(tmp_path, [60], model={"folder": str(tmp_path)})
    (tmp_path / "source" / "net.py").write_text(SHOWS_ENVIRONMENT)
    train(asked)
    seen = [path.read_text() for path in tmp_path.glob("environment-*")]
    assert seen
    assert "HOROVOD_RANK" in seen[0]
    assert not [text for text in seen if "hunter2" in text]
