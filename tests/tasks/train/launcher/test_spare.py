"""What a spare process has loaded before and after it is assigned a device."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from training_case import request

from trainwright.tasks.data import dataset
from trainwright.tasks.train import TrainRequest
from trainwright.tasks.train.hosts.host_addresses import LOOPBACK_VARIABLES
from trainwright.tasks.train.launcher.rank_process import RankProcess, start_process
from trainwright.tasks.train.request import Order

ROWS, COLUMNS = 1_000, 100
MODEL = """
import pathlib, torch

pathlib.Path({mark!r}).touch()


def build_model():
    return torch.nn.Linear({columns}, 2)
"""


def on_a_table(folder: Path) -> TrainRequest:
    """A training on a table. Importing the model's source creates a file."""
    asked = request(folder, [20])
    draw = np.random.default_rng(0)
    table = {
        "inputs": draw.random((ROWS, COLUMNS), dtype=np.float32),
        "label": draw.integers(0, 2, ROWS),
    }
    np.savez(folder / "table.npz", **table)
    uri = str(folder / "table.npz")
    given = {"uri": uri, "target": "label", "task": "tabular-classification"}
    spec = asked.job.data.model_copy(update=given)
    source = MODEL.format(mark=str(folder / "imported"), columns=COLUMNS)
    (folder / "source" / "net.py").write_text(source)
    job = asked.job.model_copy(update={"data": spec})
    return asked.model_copy(update={"job": job, "schema_": dataset.describe(spec)})


def wait_for(process: RankProcess, kind: str) -> dict[str, Any]:
    """The process's next message of this kind."""
    until = time.monotonic() + 300
    while time.monotonic() < until:
        for message in process.channel.read():
            if message["kind"] == kind:
                return message
        assert not process.channel.closed, process.log.read_text()
    raise AssertionError(f"no {kind} in 300 s")


def maps_data(process: RankProcess) -> bool:
    """Whether the process has mapped a file of data that is prepared for ranks."""
    maps = psutil.Process(process.process.pid).memory_maps()
    return any("/prepared/" in one.path and one.path.endswith(".npy") for one in maps)


def test_a_spare_process_loads_the_data_only_when_it_is_assigned_a_device(
    tmp_path: Path,
) -> None:
    asked, work = on_a_table(tmp_path), tmp_path / "work"
    order = Order(
        request=asked, mode="train", backend="torch", cgroups=[None], started_at_s=time.time()
    )
    work.mkdir()
    (work / "order.json").write_text(order.model_dump_json(by_alias=True))
    table, elsewhere = tmp_path / "table.npz", tmp_path / "elsewhere.npz"
    table.rename(elsewhere)  # reading it fails now
    spare = start_process(
        work / "order.json", None, slot=2, threads=1, log=work / "log", interface=LOOPBACK_VARIABLES
    )
    try:
        wait_for(spare, "loaded")
        assert (tmp_path / "imported").exists()
        assert not maps_data(spare)
        elsewhere.rename(table)
        spare.channel.send("device", number=0)
        assert wait_for(spare, "ready")["step"] is None
        assert maps_data(spare)
    finally:
        spare.kill()
        spare.process.wait()
        spare.channel.close()
