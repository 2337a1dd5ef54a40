"""What a result says of the devices of a training: also of one that was left out, and of those of an earlier plan."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from training_case import NO_SPARE, ROWS, planned, request

from trainwright.tasks import progress
from trainwright.tasks.errors import Interrupted
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


def test_a_device_that_holds_not_one_sample_is_left_out_and_the_others_train_to_the_end(tmp_path: Path) -> None:
    asked = request(tmp_path, [40, 1], backend="torch")
    (tmp_path / "source" / "net.py").write_text(NO_MEMORY)
    result = train(asked)
    assert [(device.batch_size, device.samples) for device in result.devices] == [(41, ROWS), (0, 0)]
    assert all(device.peak_memory_bytes > 1e8 for device in result.devices)


def test_after_a_new_plan_each_device_has_what_it_did_itself(tmp_path: Path) -> None:
    asked = request(
        tmp_path, [40, 20], devices=[{"type": "emulated", "speed": 2.0, "cores": None}, {"type": "emulated"}],
        backend="torch", epochs=4, **NO_SPARE,
    )  # fmt: skip
    stop = threading.Event()

    def hear(event: dict[str, Any]) -> None:
        if event["event"] == "train" and event["step"] >= 40:
            stop.set()

    with progress.heard_by(hear), pytest.raises(Interrupted):
        train(asked, stop=stop)
    before = int(max((tmp_path / "run/checkpoints").glob("step-*")).name.removeprefix("step-"))
    plan = planned([{"type": "emulated", "speed": 1e6, "id": "here/9"}], [60])
    result = train(asked.model_copy(update={"plan": plan}))
    epochs, steps = divmod(before, 24)  # of 60 samples; an epoch's last is of 58
    [device] = result.devices
    assert (device.id, result.steps) == ("here/9", 96)
    assert device.samples == 4 * ROWS - (epochs * ROWS + 60 * steps)
