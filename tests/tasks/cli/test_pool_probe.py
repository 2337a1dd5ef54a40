"""Finding devices: this machine, GPUs by a fake NVML, hosts that do not answer."""

from __future__ import annotations

import json
import os
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import doors
import pytest
import yaml
from typer.testing import CliRunner

from trainwright.tasks import progress
from trainwright.tasks.cli.main import app
from trainwright.tasks.cli.pool_probe import probe
from trainwright.tasks.errors import BadInput, ServiceUnreachable
from trainwright.tasks.leases.ledger import Holder
from trainwright.tasks.leases.queue import Queue
from trainwright.tasks.spec.pool import load_pool


def test_probe_finds_this_machine_and_writes_a_valid_pool_file(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "pool.yaml"
    done = CliRunner().invoke(app, ["pool", "probe", "--out", str(out), "--json"])
    assert done.exit_code == 0, done.output
    pool = load_pool(out)
    assert pool == probe([], doors.settings())
    assert pool.hosts[0].devices[0].cores == len(os.sched_getaffinity(0))
    assert yaml.safe_load(out.read_text())["hosts"][0]["address"] == "localhost"


def test_pool_and_probe_have_separate_help_and_options() -> None:
    shown = CliRunner().invoke(app, ["pool", "probe", "--help"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    assert "--host" in shown.stdout
    assert "--out" in shown.stdout
    others = CliRunner().invoke(app, ["pool", "--help"], env={"COLUMNS": "200"})
    assert "--host" not in others.stdout
    assert CliRunner().invoke(app, ["pool", "--out", "pool.yaml"]).exit_code == 2
    assert CliRunner().invoke(app, ["pool", "probe", "pool.yaml"]).exit_code == 2


@pytest.mark.parametrize("field", ["identity", "known_hosts"])
def test_a_missing_key_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    monkeypatch.setenv(f"TRAINWRIGHT_SSH_{field.upper()}", str(tmp_path / "none.key"))
    with pytest.raises(BadInput, match=rf"^ssh {field}: got .*none.key; there is no such file$"):
        probe(["127.0.0.9"], doors.settings())


FAKE_NVML = """
#include <stdio.h>
static const char *names[] = {"NVIDIA L4", "NVIDIA H200", "NVIDIA L4", "Quadro P600"};
static const unsigned long long gib[] = {22, 140, 22, 2};
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 4; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    *handle = (void *)(unsigned long)index;
    return 0;
}
int nvmlDeviceGetName(void *handle, char *name, unsigned size) {
    return snprintf(name, size, "%s", names[(unsigned long)handle]) < 0;
}
int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long *total_free_used) {
    *total_free_used = gib[(unsigned long)handle] << 30;
    return 0;
}
"""


def test_gpus_are_found_by_nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvml.c").write_text(FAKE_NVML)
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", str(library), str(tmp_path / "nvml.c")], check=True
    )
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    heard: list[dict[str, Any]] = []
    with progress.listening(heard.append):
        cpu, *gpus = probe([], doors.settings()).hosts[0].devices
    assert cpu.type == "cpu"
    assert {one.type: one.count for one in gpus} == {"nvidia-l4": 2, "nvidia-h200": 1}
    assert ["Quadro P600 is not a known device type" in one["message"] for one in heard] == [True]


def test_a_silent_host_or_an_invalid_host_name_is_reported() -> None:
    with pytest.raises(
        ServiceUnreachable,
        match=r"host 127\.0\.0\.1: .*; `ssh -o .* 127\.0\.0\.1 python3 -V` must work$",
    ):
        probe(["127.0.0.1"], doors.settings())
    with pytest.raises(BadInput, match="--host"):
        probe(["-oProxyCommand=true"], doors.settings())
    with pytest.raises(BadInput, match="--host: got 'localhost' twice; allowed: each host once"):
        probe(["localhost", "localhost"], doors.settings())


def test_the_pool_shows_when_leases_end_and_which_runs_wait(home: Path) -> None:
    device = load_pool(None).devices()[0].resource
    queue = Queue(doors.ledger())
    queue.take("run-1", Holder("alice"), [device])
    queue.look("run-2", Holder("bob"), [device], 1, priority=3)
    done = CliRunner().invoke(app, ["pool", "--json"])
    document = json.loads(done.stdout)
    assert document["devices"][0]["holder"] == "alice"
    assert document["devices"][0]["until"].endswith("+00:00")
    waits = document["queue"]
    assert [(one["place"], one["run"], one["holder"], one["priority"]) for one in waits] == [
        (1, "run-2", "bob", 3)
    ]
    assert "bob" in CliRunner().invoke(app, ["pool"]).stdout


def test_the_pool_shows_when_hosts_are_available(home: Path, tmp_path: Path) -> None:
    soon, later, past = (
        f"{datetime.now(UTC) + timedelta(hours=hours):%H:%M}" for hours in (3, 5, -3)
    )
    windows = {
        "shut": f"{soon}-{later}",
        "open": f"{past}-{soon}",
        "ever": None,
    }
    path = tmp_path / "pool.yaml"
    hosts = [
        {"name": name, "devices": [{"type": "nvidia-l4"}], "available": window}
        for name, window in windows.items()
    ]
    path.write_text(json.dumps({"name": "windows", "hosts": hosts}))
    document = json.loads(CliRunner().invoke(app, ["pool", str(path), "--json"]).stdout)
    found = {one["host"]: one for one in document["devices"]}
    assert {name: one["available"] for name, one in found.items()} == windows
    assert {name: one["available_now"] for name, one in found.items()} == {
        name: name != "shut" for name in windows
    }
    assert [(found[name]["available_changes_at"] or "")[11:16] for name in windows] == [
        soon,
        soon,
        "",
    ]
    shown = CliRunner().invoke(app, ["pool", str(path)]).stdout
    lines = {line.split()[0]: " ".join(line.split()) for line in shown.splitlines() if line.strip()}
    assert lines["shut"] == f"shut localhost {soon}-{later} closed until {soon}"
    assert lines["open"] == f"open localhost {past}-{soon} open until {soon}"
    assert "ever" not in lines  # always available: no window to show
    assert lines["shut/nvidia-l4-0"].endswith("closed now")
    assert lines["ever/nvidia-l4-0"].endswith("free")
    path.write_text(json.dumps({"name": "windows", "hosts": hosts[2:]}))
    assert "window" not in CliRunner().invoke(app, ["pool", str(path)]).stdout.replace(
        "windows", "", 1
    )
