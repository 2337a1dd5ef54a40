"""A training process whose holder ended during the start does not train."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import doors

from trainwright.tasks.leases.ledger import Holder
from trainwright.tasks.runs.artefacts.run_status import Status
from trainwright.tasks.spec.job import Job


def test_a_training_process_whose_holder_has_ended_takes_and_writes_nothing(
    home: Path, tmp_path: Path
) -> None:
    job = Job.model_validate({"name": "left", "data": {"uri": "builtin:digits"}})
    run = doors.open_for(job, Holder("me"), store=(tmp_path / "store").as_uri())
    doors.ledger().release(run.uri)
    before = run.objects.get(Status.FILE)
    with subprocess.Popen([sys.executable, "-c", ""]) as holder:
        holder.wait()
    module = "trainwright.tasks.train.launcher.background"
    command = [sys.executable, "-m", module, run.uri, "me", "--pid", str(holder.pid)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "me has ended" in ended.stderr
    assert run.objects.get(Status.FILE) == before
    assert doors.ledger().held() == []
