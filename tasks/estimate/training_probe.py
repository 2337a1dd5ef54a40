"""Runs what measures the training itself on this machine, in a separate process."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

from trainwright.infra.cpu_share import cpu_share, processors
from trainwright.infra.process import dying_with_parent
from trainwright.tasks import progress
from trainwright.tasks.errors import TrainwrightError


def can_train(what: str) -> bool:
    """Whether a training can run here; a notice says if not, and that `what` is not measured."""
    names = ("safetensors", "tensorboard")
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        progress.emit(
            "notice",
            message=f"{what} is not measured: {' and '.join(missing)} missing; install "
            "the extra `train` of trainwright",
        )
    return not missing


def measured_by(module: str, what: str, budget_s: float) -> bytes:
    """What a module of the training measures for some seconds, as JSON.

    Raises TrainwrightError if it fails.
    """
    with tempfile.TemporaryDirectory(prefix="trainwright-probe-") as name:
        found = Path(name) / "found.json"
        command = [sys.executable, "-m", module, "--out", str(found), "--budget", str(budget_s)]
        with (
            cpu_share("probe", processors()) as share,
            subprocess.Popen(
                dying_with_parent(command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            ) as process,
        ):
            share.take(process.pid)
            try:
                _, stderr = process.communicate()
            except BaseException:
                process.kill()
                raise
        if process.returncode != 0:
            last = (stderr.strip().splitlines() or ["no output"])[-1]
            raise TrainwrightError(
                f"calibrate: measuring {what} exited with {process.returncode}: {last[:300]}"
            )
        return found.read_bytes()
