"""Calibrations that are killed, started twice, on a busy machine, or shared by the store.

Real processes, the shortest budgets.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import doors
import psutil
import pytest

from trainwright.estimator.predict.calibration import Calibration, load, save
from trainwright.tasks.errors import BadInput, RunHeld
from trainwright.tasks.estimate import calibrate as step
from trainwright.tasks.spec.pool import load_pool

CALIBRATE = [sys.executable, "-m", "trainwright.tasks.cli.main", "calibrate", "--json"]
FIELDS = {
    "device_type",
    "threads",
    "dtype",
    "torch",
    "processor",
    "measurements",
    "sentinel_drift",
    "cross_validated_error",
    "duration_s",
}


@dataclass
class Resumed:
    """A `trainwright calibrate` that was killed, its truncated file, and the start after it."""

    out: Path
    left_alive: list[psutil.Process]
    written_by_first: bool
    kept: bytes
    grown: bytes
    second: subprocess.Popen[str]
    stdout: str


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Resumed:
    """Kill it by SIGKILL after some networks, truncate the last line, and start it again."""
    out = tmp_path_factory.mktemp("made") / "cpu.json"
    samples = out.with_name("cpu.json.samples")
    with _start(out, "--most-drift", "1e9") as first:
        _wait_for_samples(samples, 3)
        children = psutil.Process(first.pid).children(recursive=True)
        os.kill(first.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(children, timeout=60)
    kept = samples.read_bytes()
    kept = kept[: kept.rindex(b"\n") + 1]
    samples.write_bytes(kept + kept[:300])
    written = out.exists()
    with _start(out, "--most-drift", "1e9") as second:
        grown = _wait_for_samples(samples, kept.count(b"\n") + 1)
        stdout, _ = second.communicate(timeout=250)
    return Resumed(out, alive, written, kept, grown, second, stdout)


@pytest.fixture(scope="module")
def calibration(_made_once: Path) -> Calibration:
    """A very short calibration of this machine, however busy it is."""
    return load(_made_once / "calibrations" / step.cached(1, doors.settings()).name)


@pytest.fixture
def shared(calibration: Calibration, home: Path, tmp_path: Path) -> str:
    """A store with the calibration of an equal machine; this machine has none of its own."""
    uri = (tmp_path / "store").as_uri()
    save(calibration, tmp_path / "store" / "calibrations" / "cpu" / f"{step.key(1)}.json")
    return uri


def _start(out: Path, *options: str) -> subprocess.Popen[str]:
    command = [*CALIBRATE, "--out", str(out), "--budget", "1", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _wait_for_samples(path: Path, count: int) -> bytes:
    deadline = time.monotonic() + 120
    while not (path.exists() and path.read_bytes().count(b"\n") >= count):
        assert time.monotonic() < deadline, "nothing was measured"
        time.sleep(0.02)
    return path.read_bytes()


@pytest.mark.slow
def test_a_killed_calibration_with_a_truncated_file_resumes_and_leaves_no_files(
    resumed: Resumed,
) -> None:
    assert resumed.left_alive == []
    assert not resumed.written_by_first
    assert resumed.grown.startswith(resumed.kept)
    assert all(
        json.loads(line) for line in resumed.grown.splitlines()[: resumed.grown.count(b"\n")]
    )
    assert resumed.second.returncode == 0
    document = json.loads(resumed.stdout)
    assert document.keys() >= FIELDS
    assert load(resumed.out).measurements == document["measurements"] > 50
    assert [one.name for one in resumed.out.parent.iterdir()] == ["cpu.json"]


def test_a_concurrent_start_is_refused_and_an_interrupt_exits_with_130_and_keeps_the_samples(
    tmp_path: Path,
) -> None:
    out = tmp_path / "cpu.json"
    with _start(out) as first:
        before = _wait_for_samples(tmp_path / "cpu.json.samples", 1)
        with pytest.raises(RunHeld, match="another process is measuring into"):
            step.calibrate(out, budget_s=1.0)
        with _start(out) as second:
            _, stderr = second.communicate(timeout=60)
        assert second.returncode == 1
        assert (
            stderr.strip()
            .splitlines()[-1]
            .startswith("trainwright: calibrate: another process is measuring into")
        )
        assert "Traceback" not in stderr
        first.send_signal(signal.SIGINT)
        stdout, stderr = first.communicate(timeout=60)
    assert first.returncode == 130, stderr
    assert "the same command continues the measurement" in json.loads(stdout)["error"]["message"]
    assert (
        (tmp_path / "cpu.json.samples").read_bytes().startswith(before[: before.rindex(b"\n") + 1])
    )


@pytest.mark.slow
def test_a_busy_machine_is_refused_and_the_next_start_measures_again(tmp_path: Path) -> None:
    with _start(tmp_path / "cpu.json", "--most-drift", "0") as process:
        stdout, stderr = process.communicate(timeout=250)
    assert process.returncode == 1
    assert json.loads(stdout)["error"]["kind"] == "busy"
    assert "allowed: 0 %" in stderr.strip().splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"device": "cuda:0"}, "--device: got 'cuda:0'; torch finds here: cpu"),
        ({"threads": 5000}, "--threads: got 5000"),
        ({"budget_s": float("nan")}, "--budget: got nan"),
        ({"budget_s": float("inf")}, "--budget: got inf"),
        ({"most_drift": float("nan")}, "--most-drift: got nan"),
        ({"most_drift": -1.0}, "--most-drift: got -1"),
        ({"out": Path("/")}, "--out: /: is a folder"),
        ({"out": Path("/proc/nowhere/cpu.json")}, "can't be written"),
        ({"out": Path("/proc/cpu.json")}, "can't be written"),
    ],
)
def test_impossible_options_are_refused_before_the_measurement(
    options: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=says):
        step.calibrate(**{"out": tmp_path / "cpu.json", "budget_s": 1.0, **options})
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_can_not_be_written_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINWRIGHT_HOME", "/proc/nowhere")
    with pytest.raises(BadInput, match=r"^TRAINWRIGHT_HOME: /proc/nowhere/.*: can't be written"):
        step.calibration_for(1, doors.settings())


def test_an_equal_machine_uses_the_stores_calibration(
    calibration: Calibration, shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert step.calibration_for(1, doors.settings(), shared) == calibration
    assert load(step.cached(1, doors.settings())) == calibration
    monkeypatch.setenv("TRAINWRIGHT_STORE", "ftp://nowhere")  # from now on the cache suffices
    assert step.calibration_for(1, doors.settings()) == calibration


def test_a_calibration_of_a_busy_machine_is_reported_and_expires_soon(
    calibration: Calibration, shared: str, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    busy = calibration.model_copy(update={"sentinel_drift": 245.3})
    save(busy, step.cached(1, doors.settings()))
    with caplog.at_level("INFO", "trainwright"):
        assert step.calibration_for(1, doors.settings(), shared) == busy
    assert "its speed varied by a factor of 246: predictions are rough" in caplog.text
    long_ago = time.time() - step.BUSY_KEPT_S - 1
    os.utime(step.cached(1, doors.settings()), (long_ago, long_ago))
    assert step.calibration_for(1, doors.settings(), shared) == calibration


@pytest.mark.parametrize(
    "changes",
    [{"processor": "another"}, {"torch": "1.0.0"}, {"threads": 2}, {"schema_version": 99}, None],
)
def test_damaged_or_foreign_calibrations_in_the_store_are_not_used(
    changes: dict[str, Any] | None, calibration: Calibration, shared: str, tmp_path: Path
) -> None:
    assert step.from_store(shared, "cpu", 1, doors.settings()) == calibration
    path = tmp_path / "store" / "calibrations" / "cpu" / f"{step.key(1)}.json"
    if changes is None:
        path.write_bytes(path.read_bytes()[:1000])
    else:
        save(calibration.model_copy(update=changes), path)
    assert step.from_store(shared, "cpu", 1, doors.settings()) is None


def test_an_unreachable_store_gives_a_notice_and_no_calibration(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "trainwright"):
        assert step.from_store("s3://trainwright", "cpu", 1, doors.settings()) is None
    assert "the store's calibration is not used: S3 server" in caplog.text


def test_only_this_machines_cpus_can_be_measured_here(tmp_path: Path) -> None:
    pool = tmp_path / "pool.yaml"
    pool.write_text(
        "name: lab\nhosts:\n"
        "- name: here\n"
        "  devices: [{type: cpu, cores: 2}, {type: cpu, cores: 0.5}, {type: emulated, speed: 2}]\n"
        "- name: there\n  address: 10.0.0.7\n"
        "  devices: [{type: cpu, cores: 2}, {type: cpu, cores: 8}, {type: nvidia-t4}]\n"
    )
    kinds = load_pool(pool).kinds()
    assert [(one["device_type"], one["threads"]) for one in kinds] == [
        ("cpu", 2),
        ("cpu", 1),
        ("emulated", 1),
        ("cpu", 8),
        ("nvidia-t4", 1),
    ]
    why = [step.why_not_here(one["device_type"], one["addresses"]) for one in kinds]
    assert why[:2] == [None, None]
    assert "configured, not measured" in str(why[2])
    assert "not on this machine" in str(why[3])
    assert "this task does not measure GPUs" in str(why[4])
    with pytest.raises(BadInput, match="device type: got 'tpu'; allowed: amd"):
        step.why_not_here("tpu", ["localhost"])
