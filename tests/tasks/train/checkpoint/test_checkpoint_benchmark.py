"""The checkpoint benchmark, terminated by SIGTERM, leaves no server, no rank and no file."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from hosts_case import until

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "train" / "checkpoint.py"


def started_for(folder: Path) -> list[list[str]]:
    """The command lines of all processes of the benchmark whose TMPDIR is this folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("TMPDIR") == str(folder):
                found.append(process.cmdline())
    return found


@pytest.mark.parametrize(
    "begun",
    ["-s3.port", pytest.param("trainwright.tasks.train.worker.entry", marks=pytest.mark.slow)],
    ids=["while its server starts", "while its ranks run"],
)
def test_a_terminated_checkpoint_benchmark_leaves_nothing(begun: str, tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARK), "--model", "small", "--checkpoints", "40"]
    with (tmp_path / "output").open("wb") as output:
        benchmark = subprocess.Popen(
            command,
            cwd=tmp_path,
            env={**os.environ, "TMPDIR": str(tmp_path)},
            stdout=output,
            stderr=output,
        )
    try:
        assert until(lambda: any(begun in word for line in started_for(tmp_path) for word in line))
        benchmark.send_signal(signal.SIGTERM)
        assert benchmark.wait(timeout=300) == 143, (tmp_path / "output").read_text()
    finally:
        benchmark.kill()
        benchmark.wait()
    assert until(lambda: started_for(tmp_path) == [])
    assert [path.name for path in tmp_path.iterdir()] == ["output"]
