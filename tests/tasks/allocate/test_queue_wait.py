"""The wait in a cluster's queue counts in the deadline. `srun` is a fake, but for the last test."""

from __future__ import annotations

import json
import os
import subprocess
from datetime import datetime
from pathlib import Path

import pytest
from hosts_case import until
from plans import DATA, curve
from slurm_lab import SlurmLab

from trainwright.tasks.allocate.planner import make_plan
from trainwright.tasks.allocate.queue_wait import with_queue_wait
from trainwright.tasks.errors import Infeasible
from trainwright.tasks.runs.artefacts.estimate import Estimate
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.settings import Settings
from trainwright.tasks.slurm.expected_start import start_after_s
from trainwright.tasks.spec.job import Job
from trainwright.tasks.spec.pool import load_pool

NOW = datetime(2026, 1, 5, 12, 0)
KUBERNETES = {"engine": "kubernetes", "kubernetes": {"image": "train:1"}}


def job(folder: Path, deadline_s: float | None = None, **pool: object) -> Job:
    file = folder / "pool.json"
    hosts = [{"name": "cpu", "count": 3, "devices": [{"type": "cpu"}]}]
    file.write_text(json.dumps({"name": "p", "engine": "slurm", "hosts": hosts, **pool}))
    deadline = {} if deadline_s is None else {"deadline": f"{deadline_s}s"}
    fields = {
        "name": "j",
        "data": {"uri": "builtin:digits"},
        "objective": {"minimize": "energy", **deadline},
        "train": {"epochs": 100},
    }
    return Job.model_validate({**fields, "pool": str(file)})


def make(job: Job) -> Plan:
    estimate = Estimate(mode="calibrated", gradient_bytes=1e6, curves=[curve(1.0)])
    return make_plan(job, load_pool(job.pool), estimate, DATA)


@pytest.fixture
def fake_srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the fake says, in a file: a number of seconds from now, or an error."""
    folder = tmp_path / "bin"
    folder.mkdir()
    says = folder / "says"
    (folder / "srun").write_text(
        f"""#!/bin/sh
case "$(cat {says})" in
*[!0-9]*) cat {says} >&2; exit 1;;
*) date -d "+$(cat {says}) seconds" \
    "+srun: Job 1 to start at %Y-%m-%dT%H:%M:%S using 1 processors on nodes n" >&2;;
esac
"""
    )
    (folder / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return says


def test_a_wait_leaves_less_time_for_the_training(tmp_path: Path, fake_srun: Path) -> None:
    frugal = make(job(tmp_path))
    assert frugal.not_exceeded is not None
    assert len(frugal.devices) == 1
    deadline_s = round(frugal.not_exceeded.duration_s + 70)
    fake_srun.write_text("10")
    patient = with_queue_wait(make, job(tmp_path, deadline_s), Settings())
    assert len(patient.devices) == 1
    assert patient.queue_wait is not None
    assert 8 <= (patient.queue_wait.expected_s or 0) <= 10
    fake_srun.write_text("100")
    hurried = with_queue_wait(make, job(tmp_path, deadline_s), Settings())
    assert len(hurried.devices) > 1
    assert hurried.deadline_s == deadline_s
    assert hurried.queue_wait is not None
    assert hurried.queue_wait.in_words.startswith("Slurm expects to grant its hosts in 1 min ")


@pytest.mark.parametrize("wait_s", [100_000, 130])
def test_a_deadline_that_the_wait_uses_up_is_infeasible(
    wait_s: int, tmp_path: Path, fake_srun: Path
) -> None:
    fake_srun.write_text(str(wait_s))
    with pytest.raises(
        Infeasible, match=r"expects to grant the hosts in .*, which counts; the near"
    ) as late:
        with_queue_wait(make, job(tmp_path, 140), Settings())
    assert late.value.exit_code == 3
    assert late.value.details["nearest_deadline_s"] > wait_s


def test_a_wait_that_nobody_knows_is_unknown_and_not_zero(
    tmp_path: Path, fake_srun: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_srun.write_text("allocation failure: Requested node configuration is not available")
    plan = with_queue_wait(make, job(tmp_path, 10_000), Settings())
    assert plan.queue_wait is not None
    assert plan.queue_wait.expected_s is None
    says = "Requested node configuration is not available"
    assert plan.queue_wait.in_words == f"wait in Slurm's queue unknown: {says}"
    on_kubernetes = with_queue_wait(make, job(tmp_path, **KUBERNETES), Settings())
    assert on_kubernetes.queue_wait is not None
    assert "Kubernetes does not say" in on_kubernetes.queue_wait.in_words
    hosts = [{"name": "h", "address": "10.0.0.1", "devices": [{"type": "cpu"}]}]
    by_ssh = job(tmp_path, engine="ssh", hosts=hosts)
    assert with_queue_wait(make, by_ssh, Settings()).queue_wait is None
    monkeypatch.setenv("PATH", str(tmp_path))
    plan = with_queue_wait(make, job(tmp_path), Settings())
    assert plan.queue_wait is not None
    assert plan.queue_wait.unknown.startswith("Slurm: srun is not installed on this machine")


@pytest.mark.parametrize(
    ("says", "after_s"),
    [
        ("srun: Job 9 to start at 2026-01-05T12:10:00 using 2 processors on nodes h[1-2]", 600.0),
        ("srun: Job 9 to start at 2026-01-05T11:59:59 using 2 processors on nodes h1", 0.0),
        ("srun: Job 9 to start at 2027-01-05T12:00:00 using 2 processors on nodes h1", None),
        ("srun: error: invalid partition specified: nope", None),
        ("", None),
    ],
)
def test_what_srun_says_about_a_start(says: str, after_s: float | None) -> None:
    found = start_after_s(says, NOW)
    assert found.after_s == after_s
    assert (found.why == "") == (after_s is not None)


@pytest.mark.slow
def test_a_real_cluster_says_when_busy_nodes_are_free(tmp_path: Path, slurm: SlurmLab) -> None:
    wanted = job(tmp_path, slurm={"partition": "work"})
    all_hosts = wanted.devices.model_copy(update={"min_count": 3})
    three = make(wanted.model_copy(update={"devices": all_hosts}))
    assert len({device.host for device in three.devices}) == 3
    free = with_queue_wait(lambda _: three, wanted, Settings())
    assert free.queue_wait is not None
    assert free.queue_wait.in_words == "Slurm expects to grant its hosts at once"
    busy = subprocess.Popen(["srun", "--partition=work", "--nodes=1", "--time=10", "sleep", "60"])
    try:
        assert until(lambda: "RUNNING" in "".join(slurm.queue()), 10)
        waits = with_queue_wait(lambda _: three, wanted, Settings()).queue_wait
        one = with_queue_wait(make, wanted, Settings()).queue_wait
    finally:
        busy.terminate()
        busy.wait()
    assert waits is not None
    assert 500 < (waits.expected_s or 0) <= 600
    assert one is not None
    assert one.expected_s == 0.0
