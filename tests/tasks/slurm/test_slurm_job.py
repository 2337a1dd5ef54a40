"""The guard that cancels a job. `scancel` and `squeue` are scripts here."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from hosts_case import until

from trainwright.tasks.slurm import slurm_job


@pytest.fixture
def cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A line for each scancel. The job is in the queue as long as the file `queued` has lines."""
    said = tmp_path / "cancelled"
    scripts = {
        "scancel": f'echo "$@" >> {said}',
        "squeue": f"[ -s {tmp_path}/queued ] || exit 0; head -n 1 {tmp_path}/queued; "
        f"sed -i 1d {tmp_path}/queued",
    }
    for name, text in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return said


def test_a_job_is_cancelled_until_it_has_left_the_queue_and_again_later(
    cancelled: Path, tmp_path: Path
) -> None:
    (tmp_path / "queued").write_text("12\n12\n")
    slept: list[float] = []
    slurm_job.cancel("ours", slept.append)
    assert cancelled.read_text() == "--quiet --name=ours\n" * 4
    assert [one for one in slept if one] == [2.0, 5.0, 30.0]


def test_a_silent_controller_is_asked_for_minutes(cancelled: Path, tmp_path: Path) -> None:
    (tmp_path / "squeue").write_text("#!/bin/sh\nexit 1\n")
    slept: list[float] = []
    slurm_job.cancel("ours", slept.append)
    assert sum(slept) == 227.0


def test_a_guard_that_is_asked_to_end_still_cancels_the_job(cancelled: Path) -> None:
    process = subprocess.Popen([*slurm_job.ended_with_its_process("ours"), "sleep", "600"])
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    assert until(lambda: Path(f"/proc/{process.pid}/comm").read_text() == "sleep\n")
    (guard,) = children.read_text().split()
    assert until(lambda: int(guard) == os.getsid(int(guard)))
    for number in (signal.SIGTERM, signal.SIGHUP):
        os.kill(int(guard), number)
    assert not cancelled.exists()
    process.kill()
    process.wait()
    assert until(lambda: cancelled.exists())
    os.kill(int(guard), signal.SIGKILL)
