"""A rank's memory besides its model, measured by a training of a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_a_rank_needs_the_memory_of_its_libraries(tmp_path: Path, home: Path) -> None:
    out = tmp_path / "process.json"
    module = "trainwright.tasks.train.worker.measure_process"
    command = [sys.executable, "-m", module, "--out", str(out)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=240)
    assert 100 * 2**20 < float(json.loads(out.read_bytes())) < 4 * 2**30  # torch's alone is 150 MiB
