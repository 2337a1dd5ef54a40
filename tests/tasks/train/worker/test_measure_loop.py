"""The training loop's cost, measured in a separate process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from trainwright.estimator.predict.loop_cost import LoopCost, LoopWork


def test_the_loops_cost_is_positive_and_grows_with_the_model(tmp_path: Path, home: Path) -> None:
    out = tmp_path / "loop.json"
    command = [
        sys.executable,
        "-m",
        "trainwright.tasks.train.worker.measure_loop",
        "--out",
        str(out),
        "--budget",
        "0.1",
    ]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=240)
    cost = LoopCost.model_validate_json(out.read_bytes())
    small, normed = LoopWork(1, 2, 72, 2048, 0, 0), LoopWork(1, 26, 840, 2048, 12, 24_576)
    assert 0 <= cost(small) <= cost(normed)
    assert cost(normed) > 0
    assert any(vars(cost).values())
