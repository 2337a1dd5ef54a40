"""What is asked of Slurm for a host, and how its commands' answers are read."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from trainwright.tasks.errors import BadInput, ServiceUnreachable
from trainwright.tasks.runs.artefacts.plan import PlannedDevice
from trainwright.tasks.settings import Settings
from trainwright.tasks.slurm import slurm_answers, slurm_commands
from trainwright.tasks.spec.pool import Pool
from trainwright.tasks.train.hosts.host_engine import HostRequest
from trainwright.tasks.train.hosts.host_order import numbered, require_gpus
from trainwright.tasks.train.hosts.slurm.slurm_engine import SlurmEngine

GPU = "nvidia-a100-80gb"


def pool(slurm: dict[str, Any], devices: list[dict[str, Any]], **host: Any) -> Pool:
    hosts = [{"name": "node", "devices": devices, **host}]
    fields = {"name": "p", "engine": "slurm", "slurm": slurm, "hosts": hosts}
    return Pool.model_validate(fields)


def asked(pool: Pool, used: int) -> HostRequest:
    devices = [PlannedDevice.model_construct(**dict(one)) for one in pool.devices()[:used]]
    return HostRequest(pool.hosts[0], tuple(devices), "python3")


def command(pool: Pool, used: int, monkeypatch: pytest.MonkeyPatch, **settings: str) -> list[str]:
    monkeypatch.setattr(SlurmEngine, "_ask", lambda self: {})  # there is no cluster here
    words = SlurmEngine(pool, Settings(settings), "digits").command(
        asked(pool, used), ["python3", "-c", "a b"]
    )
    return words[words.index("srun") :]


def test_a_job_asks_for_the_gpus_that_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"partition": "gpu,long", "constraint": "a100&nvlink", "account": "x", "qos": "high"}
    found = pool(
        {**options, "gres": "gpu:a100", "cpus_per_gpu": 4, "time_limit": "90s"},
        [{"type": GPU, "count": 8}],
        memory="64GiB",
    )
    words = command(found, 3, monkeypatch)
    assert {"--nodes=1", "--ntasks=1", "--gres=gpu:a100:3", "--cpus-per-task=12"} <= set(words)
    assert {"--partition=gpu,long", "--constraint=a100&nvlink", "--mem=65536M"} <= set(words)
    assert {"--account=x", "--qos=high", "--time=2"} <= set(words)
    assert words[-4:] == ["--", "python3", "-c", "a b"]


def test_a_job_asks_for_the_cores_of_its_cpu_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    found = pool({"node": "n7"}, [{"type": "cpu", "cores": 2.5}, {"type": "cpu", "cores": 1.0}])
    words = command(found, 2, monkeypatch)
    assert "--nodelist=n7" in words
    assert "--cpus-per-task=4" in words
    assert not [word for word in words if word.startswith("--gres")]


def test_a_pools_options_come_before_those_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"TRAINWRIGHT_SLURM_ACCOUNT": "ours", "TRAINWRIGHT_SLURM_PARTITION": "long"}
    words = command(pool({"partition": "gpu"}, [{"type": "cpu"}]), 1, monkeypatch, **given)
    assert {"--account=ours", "--partition=gpu"} <= set(words)
    with pytest.raises(BadInput, match=r"TRAINWRIGHT_SLURM_\*: qos: got '-x'"):
        command(pool({}, [{"type": "cpu"}]), 1, monkeypatch, TRAINWRIGHT_SLURM_QOS="-x")
    with pytest.raises(BadInput, match="TRAINWRIGHT_SLURM_CONFIG: got /none; there is no such"):
        command(pool({}, [{"type": "cpu"}]), 1, monkeypatch, TRAINWRIGHT_SLURM_CONFIG="/none")


def test_no_two_requests_have_the_same_job_name(monkeypatch: pytest.MonkeyPatch) -> None:
    found = pool({}, [{"type": "cpu"}])
    names = {command(found, 1, monkeypatch)[1] for _ in range(3)}
    assert len(names) == 3
    assert all(name.startswith("--job-name=trainwright-digits-node-") for name in names)


def test_only_harmless_variables_of_the_launcher_reach_the_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = command(pool({}, [{"type": "cpu"}]), 1, monkeypatch)
    assert "--export=HOME,USER,LOGNAME,PATH,LANG,LC_ALL" in words


def test_devices_are_numbered_as_the_job_sees_them() -> None:
    devices = [
        PlannedDevice.model_construct(type=GPU, address=address, index=index, engine="slurm")
        for address, index in (("a", 2), ("b", 5), ("a", 7))
    ]
    assert [one.index for one in numbered(devices, "a")] == [0, 5, 1]
    by_ssh = [one.model_copy(update={"engine": "ssh"}) for one in devices]
    assert [one.index for one in numbered(by_ssh, "a")] == [2, 5, 7]


def test_fewer_gpus_than_the_plan_uses_are_refused() -> None:
    devices = [
        PlannedDevice.model_construct(type=kind, address="a", index=0, engine="slurm")
        for kind in (GPU, GPU, "cpu")
    ]
    for visible in ("0,1", "2,5", ""):  # empty: the cluster does not say
        require_gpus(devices, "a", visible)
    for visible, count in (("3", 1), ("NoDevFiles", 0)):
        with pytest.raises(BadInput, match=rf"gave {count} GPU\(s\) .* plan uses 2; allowed"):
            require_gpus(devices, "a", visible)
    by_ssh = [one.model_copy(update={"engine": "ssh"}) for one in devices]
    require_gpus(by_ssh, "a", "3")


MUNGE = """squeue: error: If munged is up, restart with --num-threads=10
squeue: error: Munge encode failed: Failed to access "/run/x": No such file (Did you start munged?)
squeue: error: slurm_send_node_msg: auth_g_create: REQUEST_JOB_INFO has authentication error
slurm_load_jobs error: Protocol authentication error
"""


@pytest.mark.parametrize(
    ("stderr", "says", "refused"),
    [
        (
            "srun: error: invalid partition specified: nope\n"
            "srun: error: Unable to allocate resources: Invalid partition name specified\n",
            "Invalid partition name specified",
            True,
        ),
        (
            "srun: error: Memory specification can not be satisfied\nsrun: error: Unable to "
            "allocate resources: Requested node configuration is not available\n",
            "Requested node configuration is not available",
            True,
        ),
        (
            "srun: error: Unable to allocate resources: Invalid account or account/partition "
            "combination specified\n",
            "Invalid account or account/partition combination specified",
            True,
        ),
        (
            MUNGE,
            'Munge encode failed: Failed to access "/run/x": No such file (Did you start munged?)',
            False,
        ),
        (
            "srun: error: Unable to allocate resources: Unable to contact slurm controller "
            "(connect failure)\n",
            "Unable to contact slurm controller (connect failure)",
            False,
        ),
        (
            "slurmstepd: error: *** STEP 3.0 ON h1 CANCELLED AT 2026-01-01T00:00:00 DUE TO "
            "PREEMPTION ***\nsrun: Force Terminated StepId=3.0\n",
            "Slurm ended its job: preemption",
            False,
        ),
        ("srun: job 3 queued and waiting for resources\n", "", False),
    ],
)
def test_errors_of_slurm_are_one_line(stderr: str, says: str, refused: bool) -> None:
    assert slurm_answers.why(stderr) == says
    assert slurm_answers.is_refusal(says) == refused
    engine = SlurmEngine(pool({"partition": "nope"}, [{"type": "cpu"}]), Settings(), "digits")
    error = engine.error(asked(pool({}, [{"type": "cpu"}]), 1), says)
    assert isinstance(error, BadInput if refused else ServiceUnreachable)


def test_srun_that_says_nothing_has_lost_its_job() -> None:
    engine = SlurmEngine(pool({}, [{"type": "cpu"}]), Settings(), "digits")
    assert engine.why_ended("", 0) == "its job in Slurm has ended"


def test_variables_that_change_slurms_commands_do_not_reach_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`squeue` is a script here that prints its environment in place of reasons."""
    (tmp_path / "squeue").write_text("#!/bin/sh\nenv | sed 's/.*/1|PENDING|N\\/A|&|a/'\n")
    (tmp_path / "squeue").chmod(0o755)
    (tmp_path / "slurm.conf").touch()
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in ("SLURM_TIME_FORMAT", "SLURM_JOB_ID", "SQUEUE_STATES", "SINFO_PARTITION"):
        monkeypatch.setenv(name, "1")
    settings = Settings({"TRAINWRIGHT_SLURM_CONFIG": str(tmp_path / "slurm.conf")})
    listed = slurm_commands.said(settings, "squeue")
    assert "SLURM_CONF" in listed
    assert f"PATH={tmp_path}" in listed
    assert not [one for one in ("SLURM_TIME", "SLURM_JOB", "SQUEUE", "SINFO") if one in listed]


def test_the_queue_says_which_jobs_wait_and_which_never_start() -> None:
    found = slurm_answers.waiting(
        "1|PENDING|2026-01-01T12:00:00|Resources|a\n2|RUNNING|2026-01-01T00:00:00|None|b\n"
        "3|PENDING|N/A|BadConstraints|c\n4|PENDING|N/A|ReqNodeNotAvail, UnavailableNodes:h2|d\n"
        "5|PENDING|N/A|QOSMaxCpuPerJobLimit|e\n6|PENDING|2027-01-01T00:00:00|Priority|f\n"
        "7|PENDING|N/A|Job's account not permitted to use this partition (a allows x not y)|g\n"
        "8|RUNNING|2026-01-01T00:00:00|None|x|y\nz\n",
        datetime(2026, 1, 1),
    )
    assert [name for name, job in found.items() if job.state in slurm_answers.WAITING] == [
        *("a", "c", "d", "e", "f", "g")
    ]
    assert [name for name, job in found.items() if job.never_starts] == ["c", "e", "g"]
    # a job without a time limit is before f, and counts as one of a year
    assert [found[one].starts for one in "adf"] == ["2026-01-01T12:00:00", "", ""]
    assert found["a"].in_words == "in Slurm's queue: job 1 (Resources)"
    assert found["d"].reason == "ReqNodeNotAvail, UnavailableNodes:h2"
