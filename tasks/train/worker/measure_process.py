"""Measures the memory of a rank besides its model: interpreter, libraries, collectives, records.

Run it with `python -m trainwright.tasks.train.worker.measure_process --out FILE`. A launcher trains
a model of a few bytes on one rank, which loads what every rank loads. The measure is the rank's
peak resident memory. It depends on the builds of torch and Horovod, and on the kernel.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np  # noqa: TID253 - this is a process of its own

from trainwright.tasks.data import dataset as data
from trainwright.tasks.train.launcher.launch import train
from trainwright.tasks.train.worker.measured_request import measured_job, measured_request

_BATCH, _ROWS, _WIDTH = 64, 256, 8
_SOURCE = """
from torch import nn


def build_model(width):
    return nn.Linear(width, 2)
"""


def measure_process(folder: Path) -> float:
    """The bytes of a rank of this machine. `folder` takes model, data and records.

    Raises TrainwrightError if the training fails.
    """
    draw = np.random.default_rng(0)
    np.savez(
        folder / "rows.npz",
        inputs=draw.random((_ROWS, _WIDTH), dtype=np.float32),
        label=draw.integers(0, 2, _ROWS),
    )
    (folder / "model.py").write_text(_SOURCE)
    job = measured_job(folder / "rows.npz", folder / "model.py", {"width": _WIDTH}, _BATCH)
    (work := folder / "work").mkdir()
    result = train(measured_request(job, data.load(job.data).schema, work))
    return max(one.peak_memory_bytes for one in result.devices)


def main() -> int:
    """Measure, and write the bytes as JSON."""
    parser = argparse.ArgumentParser(
        description="Measures the memory of a rank besides its model on this machine."
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, help="not used: one training is enough")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trainwright-process-") as name:
        given.out.write_text(json.dumps(measure_process(Path(name))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
