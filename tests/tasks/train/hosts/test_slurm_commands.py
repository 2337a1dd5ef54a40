"""What is asked of Slurm for a host, and how its commands' answers are read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from trainwright.tasks.errors import BadInput, ServiceUnreachable
from trainwright.tasks.runs.artefacts.plan import PlannedDevice
from trainwright.tasks.settings import Settings
from trainwright.tasks.slurm import slurm_commands
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


@pytest.mark.parametrize(
    ("why", "error"),
    [
        ("Invalid partition name specified", BadInput),
        ("Unable to contact slurm controller (connect failure)", ServiceUnreachable),
        ("", ServiceUnreachable),
    ],
)
def test_what_slurm_refuses_is_bad_input_and_all_else_is_not(
    why: str, error: type[Exception]
) -> None:
    engine = SlurmEngine(pool({"partition": "nope"}, [{"type": "cpu"}]), Settings(), "digits")
    found = engine.error(asked(pool({}, [{"type": "cpu"}]), 1), why)
    assert type(found) is error
    assert ("--partition=nope" in str(found)) == (error is BadInput)


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
