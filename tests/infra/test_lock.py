"""A lock between processes: one holder, freed when it ends, kept by a child that inherits it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trainwright.infra.lock import locked

HOLD = """
import sys, time
from pathlib import Path
from trainwright.infra.lock import locked
with locked(Path(sys.argv[1]), wait=True):
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


def _holder(path: Path, seconds: float) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path), str(seconds)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_lock_is_refused_until_its_holder_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with _holder(path, 600) as first:
        with pytest.raises(BlockingIOError), locked(path, wait=False):
            pass
        first.send_signal(signal.SIGKILL)
        first.wait()
    with locked(path, wait=False):
        assert path.exists()
    assert not path.exists()


def test_a_waiting_process_gets_the_lock_when_it_is_released(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with _holder(path, 0.5) as first, locked(path, wait=True):
        with pytest.raises(BlockingIOError), locked(path, wait=False):
            pass
        assert first.wait(timeout=30) == 0


def test_a_child_that_inherits_the_lock_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with locked(path, wait=False) as descriptor:
        child = subprocess.Popen(["sleep", "600"], pass_fds=(descriptor,))
        path.rename(tmp_path / "kept")  # the file stays, as after a kill
    (tmp_path / "kept").rename(path)
    try:
        with pytest.raises(BlockingIOError), locked(path, wait=False):
            pass
    finally:
        child.kill()
        child.wait()
    with locked(path, wait=False):
        pass
