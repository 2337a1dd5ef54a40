"""What `plan` shows a person."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from trainwright.tasks import progress, screen

JOB = {
    "name": "j", "data": {"uri": "builtin:digits"}, "train": {"global_batch_size": 64},
    "model": {"source": str(Path(__file__).parents[2] / "dags" / "jobs" / "cnn.py")},
}  # fmt: skip


def test_each_devices_row_names_what_its_prediction_is_made_of(tmp_path: Path) -> None:
    pool, job = tmp_path / "pool.yaml", tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump(JOB))
    host = {"name": "far", "address": "10.0.0.1", "devices": [{"type": "nvidia-t4"}]}
    pool.write_text(yaml.safe_dump({"name": "p", "hosts": [host]}))
    command = [sys.executable, "-m", "trainwright.tasks.cli", "plan", str(job), "--pool", str(pool)]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert shown.returncode == 0, shown.stderr
    (row,) = (line for line in shown.stdout.splitlines() if "far/nvidia-t4-0" in line)
    assert "datasheet" in row
    printed = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=200, check=True).stdout
    assert [device["mode"] for device in json.loads(printed)["devices"]] == ["datasheet"]


def test_what_is_noticed_while_a_command_works_is_shown_and_nothing_after_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with screen.working("planning"):
        progress.emit("notice", message="measuring this machine")
    progress.emit("notice", message="much later")
    shown = capsys.readouterr().err
    assert "note       measuring this machine" in shown
    assert "much later" not in shown
