"""Sums of gradients stay on the GPUs, by NCCL; with one GPU in a group of one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "train" / "device_sums.py"


def test_nccl_sums_equal_those_in_host_memory_and_copy_nothing() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--megabytes", "64", "--rounds", "5"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    assert "copied to host memory with sums on the GPUs" in done.stdout
