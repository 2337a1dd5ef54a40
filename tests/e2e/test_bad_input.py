"""Bad input at the command line: one clear line, the documented exit code, nothing left behind.

Most tests call the entry point in this process; a separate process exits in the same way
(`test_a_separate_process_exits_as_its_entry_point_does`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import doors
import psutil
import pytest
import yaml
from command_line import TRAINWRIGHT, little_memory, process, run
from finished_run import finished_training, local_path

from trainwright.infra.s3_server import S3Access
from trainwright.tasks.allocate.joint_planner import MOST_JOBS
from trainwright.tasks.estimate.calibrate import cached

RUN = "20260101T000000Z-abcdef"
MODELS = {
    "none.py": "x = 1\n",
    "raises.py": "def build_model():\n    raise ValueError('no width')\n",
    "nomodule.py": "def build_model():\n    return 3\n",
    "narrow.py": "from torch.nn import *\n\n\ndef build_model():\n"
    "    return Sequential(Flatten(), Linear(64, 4))\n",
    "broken.py": "def build_model(:\n",
}


def write(folder: Path, **changes: object) -> str:
    values: dict[str, object] = {
        "name": "bad",
        "data": {"uri": "builtin:digits"},
        "model": {"source": "narrow.py"},
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(values | changes))
    for name, text in MODELS.items():
        (folder / name).write_text(text)
    return str(path)


def one_line(done: subprocess.CompletedProcess[str], code: int, says: str) -> None:
    assert done.returncode == code, done.stderr
    lines = done.stderr.strip().splitlines()
    assert lines[-1].startswith("trainwright: ")
    assert says in lines[-1]
    assert "Traceback" not in done.stderr
    if "--json" in done.args:
        assert json.loads(done.stdout)["error"]["message"] in lines[-1]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "no such file"),
        ("{", "not valid YAML or JSON"),
        ("root:*:1:::\nbin:*:1:::\n", "is missing (also wrong: data); 2 unknown fields"),
        ("", "is empty"),
        ("- a", "got a list"),
        ("name: x\ndata: {uri: 'builtin:digits'}\nwat: 1", "wat: unknown field"),
        ("name: ../x\ndata: {uri: 'builtin:digits'}", "name: got '../x'"),
        ("a: !!python/object/apply:os.system ['touch /tmp/owned']", "tags"),
    ],
)
def test_a_wrong_job_file(home: Path, tmp_path: Path, text: str | None, says: str) -> None:
    path = tmp_path / "job.yaml"
    if text is not None:
        path.write_text(text)
    one_line(run("run", str(path), "--json"), 2, says)
    assert not home.exists()  # nothing was started or written


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["run"], "Missing argument"),
        (["fly"], "No such command"),
        (["run", "x", "--colour"], "No such option"),
        (["estimate", "x.py", "--batch-size", "8"], "--calibration FILE or --device-type NAME"),
        (["estimate", "x.py", "--batch-size", "many", "--device-type", "cpu"], "--batch-size"),
        (["extract", "x.py", "--batch-size", "abc"], "--batch-size: got 'abc'; allowed: a whole"),
        (["extract", "x.py", "--depth", "-1"], "--depth: got '-1'; allowed: greater than or"),
        (["calibrate", "--out", "x", "--budget", "abc"], "--budget: got 'abc'; allowed: a number"),
        (
            ["extract", "x.py", "--config", "w=[1"],
            "--config w: not valid YAML or JSON (line 1, col",
        ),
        (["extract", "/"], "model.source: got /, which is a folder; allowed: a regular file"),
        (["extract", "/dev/null"], "/dev/null, which is a device; allowed: a regular file"),
        (["extract", "none.py"], "model.source: got none.py; there is no such file"),
        (["extract", "os.path"], "'os.path'; os has no Python file that can be copied; allowed"),
        (["extract", "no_such.module"], "or a Python module that can be imported"),
        (["show", "nonsense", "--store", "file:///nowhere"], "run: got 'nonsense'"),
        (["runs", "--store", "ftp://x"], "store: got 'ftp://x'"),
        (["runs", "--store", "s3://"], "allowed: s3://bucket/prefix or file:///folder"),
        (["runs", "--store", "s3://b"], "store: got 's3://b'; allowed: a bucket's name of 3 to 63"),
        (
            ["runs", "--store", "file:///nowhere"],
            "--store: got file:///nowhere; there is no folder /nowhere",
        ),
        (
            [
                "estimate",
                "x.py",
                "--batch-size",
                "8",
                "--device-type",
                "cpu",
                "--store",
                "file:///nowhere",
            ],
            "--store: got file:///nowhere; there is no folder /nowhere",
        ),
        (
            ["calibrate", "--out", "/nowhere/x/cpu.json"],
            "--out: /nowhere/x/cpu.json can't be written (there is no fol",
        ),
    ],
)
def test_wrong_arguments(home: Path, args: list[str], says: str) -> None:
    one_line(run(*args, "--json"), 2, says)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("pool job.yaml", "job.yaml: is a job file; its pool is p.yaml; allowed: a pool file"),
        ("plan job.yaml --pool job.yaml", "is a job file; its pool is p.yaml; allowed: a pool"),
        ("run p.yaml", "p.yaml: is a pool file; allowed: a job file, and this one as --pool p.y"),
        ("train plan.json", "plan.json: is a plan; allowed: a job file; `trainwright train JOB"),
        ("pool plan.json", "plan.json: is a plan; allowed: a pool file"),
        ("validate job.json", "job.json: is a file of a run; allowed: a job file; `trainwright"),
        (f"recommend {RUN}", f"{RUN}: is a run; allowed: a job file; `trainwright show file://"),
        (f"plan file:///s/runs/x/{RUN}", f"`trainwright show file:///s/runs/x/{RUN}` shows"),
        (f"pool s3://b/runs/x/{RUN}", f"s3://b/runs/x/{RUN}: is a run; allowed: a pool file"),
        ("show job.yaml", "job.yaml, a file; allowed: a run's URI or id; `trainwright runs`"),
        ("extract job.yaml", "that can be imported; `trainwright plan job.yaml` takes a job file"),
        ("extract ./p.yaml", "got ./p.yaml; allowed: a Python file; `trainwright plan ./p.yaml` t"),
    ],
)
def test_another_kind_of_file_is_named_with_what_takes_it(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINWRIGHT_STORE", tmp_path.as_uri())
    write(tmp_path, pool="p.yaml")
    documents = {
        "p.yaml": {"name": "p", "hosts": [{"name": "here", "devices": [{"type": "cpu"}]}]},
        "plan.json": {"schema_version": 1, "feasible": True, "devices": []},
        "job.json": {"schema_version": 1, "name": "x", "data": {"uri": "builtin:digits"}},
    }
    for name, document in documents.items():
        (tmp_path / name).write_text(json.dumps(document))
    (tmp_path / RUN).mkdir()
    one_line(run(*args.split(), "--json"), 2, says)


def test_the_version_is_that_of_the_installed_package() -> None:
    said = run("--version")
    assert (said.returncode, said.stdout) == (0, f"trainwright {version('trainwright')}\n")


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (
            ("pool", "pool.yaml", "--json"),
            1,
            "standard output: can't be written (No space left on device)",
        ),
        (
            ("pool", "pool.yaml"),
            1,
            "standard output or another open file: can't be written (No space left",
        ),
        (("show", "x", "--store", "file:///nowhere", "--json"), 2, "run: got 'x'"),
    ],
)
def test_a_full_disk_behind_standard_output(
    tmp_path: Path, args: tuple[str, ...], code: int, says: str
) -> None:
    (tmp_path / "pool.yaml").write_text("{name: p, hosts: [{name: here, devices: [{type: cpu}]}]}")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*TRAINWRIGHT, *args],
            cwd=tmp_path,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == code
    assert done.stderr.splitlines() == [
        f"trainwright: {done.stderr.removeprefix('trainwright: ').strip()}"
    ]
    assert says in done.stderr


@pytest.fixture(scope="module")
def calibration(_made_once: Path) -> dict[str, object]:
    """A calibration of this machine."""
    made = _made_once / "calibrations" / cached(1, doors.settings()).name
    written: dict[str, object] = json.loads(made.read_text())
    return written


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (None, "no such file"),
        ("", "was truncated"),
        (0.5, "was truncated"),
        ({"schema_version": 99}, "has schema version 99"),
        ({"device_type": "nvidia-t4"}, "the calibration is of nvidia-t4"),
        ({"device_type": "tpu"}, "is of device type 'tpu'; allowed: amd-mi300x"),
        ({"families": {}}, "is not a calibration"),
        ({"threads": 0}, "is not a calibration: threads"),
        ({"interval_quantile": -3}, "is not a calibration: interval_quantile"),
        ({"interval_quantile": 1e308}, "is not a calibration: interval_quantile"),
        ({"step_deviation": 1e300}, "is not a calibration: step_deviation"),
        ({"sentinel_drift": -1}, "is not a calibration: sentinel_drift"),
        (
            {"speed": {"compute_s": 0, "memory_s": 1, "calls_s": 1}},
            "is not a calibration: speed.compute_s",
        ),
    ],
)
def test_an_unusable_calibration(
    home: Path, tmp_path: Path, calibration: dict[str, object], changes: object, says: str
) -> None:
    path = tmp_path / "few.json"
    if isinstance(changes, dict):
        path.write_text(json.dumps(calibration | changes))
    elif changes is not None:
        text = json.dumps(calibration)
        path.write_text(text[: int(len(text) * float(changes or 0))])
    write(tmp_path)
    model = str(tmp_path / "narrow.py")
    given = ["--batch-size", "8", "--calibration", str(path), "--device-type", "cpu"]
    one_line(run("estimate", model, *given, "--json"), 2, says)


def test_a_calibration_of_another_torch_is_used_with_a_wider_interval_and_a_note(
    home: Path, tmp_path: Path, calibration: dict[str, object]
) -> None:
    write(tmp_path)
    (tmp_path / "narrow.py").write_text(
        MODELS["narrow.py"] + "\n\ndef example_batch(n):\n    import torch\n"
        "    return torch.rand(n, 64), torch.zeros(n, dtype=torch.long)\n"
    )
    model, documents = str(tmp_path / "narrow.py"), []
    for changes in ({}, {"torch": "1.0.0"}):
        path = tmp_path / "few.json"
        path.write_text(json.dumps(calibration | changes))
        given = ["--batch-size", "8", "--calibration", str(path), "--device-type", "cpu"]
        done = run("estimate", model, *given, "--json")
        assert done.returncode == 0, done.stderr
        documents.append(json.loads(done.stdout))
        assert ("measured with torch 1.0.0; torch " in done.stderr) is bool(changes)
    here, elsewhere = documents
    assert here["notes"] == []
    assert "`trainwright calibrate` measures again" in elsewhere["notes"][0]
    assert here["step_time_s"]["median"] == elsewhere["step_time_s"]["median"]
    assert here["step_time_s"]["high"] < elsewhere["step_time_s"]["high"]


def test_an_unknown_device_type(home: Path, tmp_path: Path) -> None:
    given = ["--batch-size", "8", "--device-type", "tpu-v5"]
    one_line(
        run("estimate", "x.py", *given, "--json"),
        2,
        "device type: got 'tpu-v5'; allowed: amd-mi300x",
    )


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--device", "cuda:0"], "torch finds here: cpu"),
        (["--device", "cuda:99", "--probes"], "torch finds here: cpu"),
        (["--probes", "--budget", "60"], "allowed with --probes: 1 to 30 s"),
        (["--device", "foo"], "--device: got 'foo'; torch finds here: cpu"),
        (["--threads", "0"], "--threads: got 0"),
        (["--budget", "nan"], "--budget: got nan"),
        (["--most-drift", "nan"], "--most-drift: got nan"),
    ],
)
def test_impossible_calibrations(home: Path, tmp_path: Path, args: list[str], says: str) -> None:
    done = run("calibrate", "--out", str(tmp_path / "few.json"), *args, "--json")
    one_line(done, 2, says)
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("missing.py", "there is no such file"),
        ("narrow.py", "model: returns 4 outputs, but the data has 10 classes"),
        pytest.param("none.py", "defines no function build_model", marks=pytest.mark.slow),
        pytest.param("raises.py", "raised ValueError: no width", marks=pytest.mark.slow),
        pytest.param(
            "nomodule.py", "returned a int; allowed: a torch.nn.Module", marks=pytest.mark.slow
        ),
        pytest.param("broken.py", "SyntaxError", marks=pytest.mark.slow),
    ],
)
def test_a_wrong_model(home: Path, tmp_path: Path, source: str, says: str) -> None:
    one_line(run("plan", write(tmp_path, model={"source": source}), "--json"), 2, says)


@pytest.mark.parametrize(
    ("pool", "changes", "code", "says"),
    [
        ({"hosts": []}, {}, 2, "hosts"),
        ({"prices": {"cpu": "-2/h"}}, {}, 2, "zero or more per h"),
        ({"network": {"bandwidth": 10}}, {}, 2, "a number with its unit"),
        ({"network": {"latency": "50"}}, {}, 2, "latency"),
        (
            {"hosts": [{"name": "h", "devices": [{"type": "abacus"}]}]},
            {},
            2,
            "hosts.0.devices.0.type: got 'abacus'",
        ),
        ({"power": {"cpu": {"idle_w": 9, "load_w": 3}}}, {}, 2, "idle_w up to load_w (3), not 9"),
        ({}, {"devices": {"min_count": 3}}, 2, "devices.min_count: got 3; pool p has 1 device(s)"),
        (
            {},
            {"devices": {"min_count": 3, "max_count": 2}},
            2,
            "max_count of at least min_count (3), not 2",
        ),
        (
            {},
            {"devices": {"types": ["nvidia-t4"]}},
            2,
            "devices.types: got 'nvidia-t4'; pool p has emulated",
        ),
        (
            {},
            {"devices": {"exclude": ["emulated"]}},
            2,
            "devices.exclude: got emulated; "
            "with this restriction the job may use 0 of the 1 device(s)",
        ),
        ({}, {"objective": {"minimize": "cost"}}, 2, "pool p has no prices"),
        ({}, {"objective": {"minimize": "time", "budget": -1}}, 2, "objective.budget: got -1"),
        ({}, {"objective": {"minimize": "time", "deadline": "0s"}}, 2, "objective.deadline: got"),
        (
            {},
            {"train": {"batch_bounds": [64, 32]}},
            2,
            "train.batch_bounds: got [64, 32]; allowed: [least, greatest]",
        ),
        ({}, {"objective": {"minimize": "time", "deadline": "1s"}}, 3, "the deadline of 1 s binds"),
        ({"prices": {"emulated": "nan/h"}}, {}, 2, "zero or more per h"),
        ({"prices": {"emulated": "9" * 400 + "/h"}}, {}, 2, "up to 1,000,000,000"),
        (
            {"power": {"emulated": {"idle_w": 1, "load_w": 1e308}}},
            {},
            2,
            "power.emulated.load_w: got 1e+308",
        ),
        (
            {"power": {"emulated": {"idle_w": float("nan"), "load_w": 2}}},
            {},
            2,
            "power.emulated.idle_w: got",
        ),
        (
            {"hosts": [{"name": "h", "devices": [{"type": "emulated", "speed": 1e308}]}]},
            {},
            2,
            "speed: got 1e+308",
        ),
        (
            {"hosts": [{"name": "h", "devices": [{"type": "emulated", "speed": 1e-308}]}]},
            {},
            2,
            "speed: got 1e-308",
        ),
        (
            {"hosts": [{"name": "h", "devices": [{"type": "emulated", "speed": float("inf")}]}]},
            {},
            2,
            "speed: got",
        ),
        (
            {"hosts": [{"name": "h", "devices": [{"type": one}]} for one in ("cpu", "nvidia-t4")]},
            {},
            2,
            "hosts with different names, not ",
        ),
        (
            {},
            {"devices": {"ids": ["h/emulated-0"] * 2}},
            2,
            "ids with each name once, not 'h/emulated-0' twice",
        ),
        (
            {},
            {"devices": {"ids": ["h/emulated-0"], "exclude": ["h"]}},
            2,
            "devices.exclude: got h; with this restriction the job may use 0",
        ),
        (
            {},
            {"objective": {"minimize": "time", "deadline": float("nan")}},
            2,
            "objective.deadline: got",
        ),
        (
            {},
            {"objective": {"minimize": "time", "budget": float("inf")}},
            2,
            "objective.budget: got",
        ),
        ({}, {"train": {"noise_scale": 1e-320}}, 2, "train.noise_scale: got 1e-320"),
    ],
)
def test_a_pool_or_limits_without_a_feasible_plan(
    home: Path,
    tmp_path: Path,
    pool: dict[str, object],
    changes: dict[str, object],
    code: int,
    says: str,
) -> None:
    path = tmp_path / "pool.yaml"
    hosts = [{"name": "h", "devices": [{"type": "emulated", "speed": 1.0}]}]
    path.write_text(yaml.safe_dump({"name": "p", "hosts": hosts} | pool))
    (tmp_path / "linear.py").write_text(
        "from torch.nn import *\n\n\ndef build_model():\n"
        "    return Sequential(Flatten(), Linear(64, 10))\n"
    )
    job = write(tmp_path, **({"model": {"source": "linear.py"}} | changes))
    store = (tmp_path / "store").as_uri()
    one_line(run("plan", job, "--pool", str(path), "--json", TRAINWRIGHT_STORE=store), code, says)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"uri": "builtin:letters"}, "builtin:digits"),
        ({"uri": "nowhere.csv"}, "nowhere.csv"),
        ({"uri": "table.csv", "target": "price"}, "price"),
        ({"uri": "ftp://x/y.csv"}, "ftp://"),
        ({"uri": "binary.csv"}, "not text"),
        ({"uri": "loop.csv"}, "loop.csv"),
        ({"uri": "pipe.csv"}, "pipe.csv, which is a pipe; allowed: a regular file"),
    ],
)
@pytest.mark.timeout(60)
def test_wrong_data(home: Path, tmp_path: Path, data: dict[str, str], says: str) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "table.csv").write_text("a,label\n1,x\n2,y\n")
    (tmp_path / "binary.csv").write_bytes(b"a,label\n1,\0\n2,y\n")
    (tmp_path / "loop.csv").symlink_to(tmp_path / "loop.csv")
    one_line(run("validate", write(tmp_path, data=data), "--json"), 2, says)


def test_a_stopped_s3_server_exits_with_4_and_says_how_to_start_it(
    home: Path, tmp_path: Path
) -> None:
    keys = {"TRAINWRIGHT_S3_ACCESS_KEY": "a", "TRAINWRIGHT_S3_SECRET_KEY": "very-secret"}
    done = run(
        "run", write(tmp_path), "--json", TRAINWRIGHT_S3_ENDPOINT="http://127.0.0.1:9", **keys
    )
    one_line(done, 4, "trainwright up")
    assert "very-secret" not in done.stdout + done.stderr
    one_line(run("runs", "--json"), 4, "trainwright up")


def test_wrong_credentials_exit_with_4_and_hide_the_secret(s3: S3Access, tmp_path: Path) -> None:
    environment = {
        "TRAINWRIGHT_S3_ENDPOINT": s3.endpoint,
        "TRAINWRIGHT_S3_ACCESS_KEY": "someone",
        "TRAINWRIGHT_S3_SECRET_KEY": "very-secret",
    }
    done = run("run", write(tmp_path), "--json", **environment)
    one_line(done, 4, "refused the credentials")
    assert "very-secret" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("environment", "code", "says"),
    [
        ({"TRAINWRIGHT_LEDGER": "nope"}, 2, "TRAINWRIGHT_LEDGER: is not a database URL"),
        ({"TRAINWRIGHT_LEDGER": "postgresql+nothing://u:secret@h/x"}, 2, "TRAINWRIGHT_LEDGER"),
        (
            {"TRAINWRIGHT_LEDGER": "sqlite:////nowhere/x.db"},
            2,
            "TRAINWRIGHT_LEDGER: there is no folder /nowhere",
        ),
        ({"TRAINWRIGHT_HOME": "/proc/nowhere"}, 4, "TRAINWRIGHT_HOME"),
        ({"TRAINWRIGHT_HOME": "/etc/passwd"}, 2, "TRAINWRIGHT_HOME: got '/etc/passwd'; allowed:"),
        ({"TRAINWRIGHT_HOME": "/etc/passwd/x"}, 2, "TRAINWRIGHT_HOME: got '/etc/passwd/x'; "),
    ],
)
def test_invalid_settings_are_named(
    home: Path, environment: dict[str, str], code: int, says: str
) -> None:
    done = run("pool", "--json", **environment)
    one_line(done, code, says)
    assert "secret" not in done.stderr


@pytest.mark.parametrize(
    "endpoint",
    ["http://127.0.0.1:99999", "http://u:secret@127.0.0.1:9", "http://127.0.0.1:9/abc", "h:9"],
)
def test_an_invalid_endpoint_is_bad_input_and_hidden(home: Path, endpoint: str) -> None:
    keys = {"TRAINWRIGHT_S3_ACCESS_KEY": "a", "TRAINWRIGHT_S3_SECRET_KEY": "b"}
    done = run("runs", "--json", TRAINWRIGHT_S3_ENDPOINT=endpoint, **keys)
    one_line(done, 2, "TRAINWRIGHT_S3_ENDPOINT")
    assert "secret" not in done.stderr


def test_processes_started_by_a_models_code_end_with_the_trace(home: Path, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        "import subprocess\nfrom torch import nn, rand, zeros\n"
        "subprocess.Popen(['sleep', '4321.5'], start_new_session=True)\n"
        "def build_model():\n    return nn.Linear(4, 2)\n"
        "def example_batch(n):\n    return rand(n, 4), zeros(n).long()\n"
    )
    assert run("extract", str(tmp_path / "model.py"), "--json").returncode == 0
    left = [
        one
        for one in psutil.process_iter(["cmdline"])
        if one.info["cmdline"] == ["sleep", "4321.5"]
    ]
    assert left == []


def test_a_damaged_run_does_not_hide_the_others(home: Path, tmp_path: Path) -> None:
    store = (tmp_path / "store").as_uri()
    good, damaged = finished_training(store, number=1), finished_training(store, number=2)
    local_path(damaged, "result.json").write_text("{")
    done = run("runs", "--json", "--store", store)
    assert done.returncode == 0
    assert {one["id"]: one["state"] for one in json.loads(done.stdout)["runs"]} == {
        good.id: good.status().state,
        damaged.id: "damaged",
    }
    local_path(good, "status.json").unlink()
    one_line(process("show", good.uri, "--json"), 1, "status.json: missing")
    one_line(run("runs", "../..", "--json", "--store", store), 2, "name: got '../..'")
    one_line(
        run("replan", good.uri, "--json"), 2, "holds no devices; allowed: a run that is training"
    )


def test_a_batch_larger_than_the_data_and_a_model_larger_than_memory(
    home: Path, tmp_path: Path
) -> None:
    (tmp_path / "wide.py").write_text(
        "from torch.nn import *\n\n\ndef build_model(width=10**10):\n"
        "    return Sequential(Flatten(), Linear(64, width), Linear(width, 10))\n"
    )
    model = {"source": "wide.py", "config": {"width": 8}}
    large = write(tmp_path, model=model, train={"global_batch_size": 10**6})
    refused = run("plan", large, "--json")
    one_line(refused, 2, "training rows")
    assert "measuring" not in refused.stderr
    pool = tmp_path / "pool.yaml"  # with a device that needs no measurement
    pool.write_text("name: p\nhosts: [{name: h, address: 10.0.0.1, devices: [{type: nvidia-t4}]}]")
    done = run("plan", write(tmp_path, model={"source": "wide.py"}), "--pool", str(pool), "--json")
    one_line(done, 3, "memory binds")
    assert json.loads(done.stdout)["error"]["binding"] == "memory"


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["run", "nowhere.yaml"], 2),
        (["runs", "--store", "s3://nowhere"], 4),
    ],
)
def test_a_separate_process_exits_as_its_entry_point_does(
    home: Path, args: list[str], code: int
) -> None:
    endpoint = {"ENDPOINT": "http://127.0.0.1:9", "ACCESS_KEY": "a", "SECRET_KEY": "b"}
    environment = {f"TRAINWRIGHT_S3_{name}": value for name, value in endpoint.items()}
    here, there = run(*args, "--json", **environment), process(*args, "--json", **environment)
    assert there.returncode == here.returncode == code, there.stderr
    assert (there.stdout, there.stderr) == (here.stdout, here.stderr)


def test_without_a_command_only_the_help_is_shown() -> None:
    done = process()
    assert done.returncode == 2
    assert "search-lr" in done.stdout
    assert done.stderr == ""


def test_help_names_the_commands_and_loads_nothing_heavy(home: Path) -> None:
    done = process("--help")
    assert done.returncode == 0
    assert "search-lr" in done.stdout
    heavy = "torch numpy pandas pyarrow dask sqlalchemy minio airflow great_expectations scipy"
    code = (
        "import sys, trainwright.tasks.cli.main; "
        "print([m for m in sys.argv[1].split() if m in sys.modules])"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code, heavy], capture_output=True, text=True, check=True
    )
    assert loaded.stdout.strip() == "[]"


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(10 * 2**30)  # a sparse file: uses no disk space


KINDS_OF_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "device": (lambda path: path.symlink_to("/dev/zero"), "is a device; allowed: a regular file"),
    "pipe": (os.mkfifo, "is a pipe; allowed: a regular file"),
    "folder": (Path.mkdir, "is a folder; allowed: a regular file"),
    "huge": (huge, "the most allowed"),
    "without a size": (lambda path: path.symlink_to("/proc/self/pagemap"), ""),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", KINDS_OF_FILES)
@pytest.mark.parametrize("named", ["job", "pool", "calibration", "structure", "plan"])
def test_an_endless_or_irregular_file_is_refused_at_once(
    home: Path, tmp_path: Path, kind: str, named: str
) -> None:
    make, says = KINDS_OF_FILES[kind]
    path = tmp_path / "given.json"
    make(path)
    given = str(path)
    command = {
        "job": ["plan", given],
        "pool": ["plan", write(tmp_path), "--pool", given],
        "calibration": ["plan", write(tmp_path), "--calibration", given],
        "structure": ["estimate", given, "--batch-size", "8", "--device-type", "cpu"],
        "plan": ["train", write(tmp_path), "--plan", given],
    }[named]
    with little_memory():
        done = run(*command, "--json")
    one_line(done, 2, says)
    assert "given.json" in done.stderr


@pytest.mark.parametrize(
    ("command", "option", "name"),
    [
        (["calibrate", "--probes", "--budget", "1"], "--out", "narrow.py"),
        (["calibrate", "--probes", "--budget", "1"], "--out", "link"),
        (["plan", "job.yaml"], "--plot", "drawing.svg"),
        (["pool", "probe"], "--out", "narrow.py"),
        (["pool", "probe"], "--out", "job.yaml"),
    ],
)
def test_a_file_of_another_kind_is_not_overwritten(
    home: Path, tmp_path: Path, command: list[str], option: str, name: str
) -> None:
    write(tmp_path)
    (tmp_path / "drawing.svg").write_text("<svg/>")
    (tmp_path / "link").symlink_to("/dev/null")
    before = (tmp_path / name).read_bytes()
    arguments = [str(tmp_path / one) if one == "job.yaml" else one for one in command]
    done = run(*arguments, option, str(tmp_path / name), "--json")
    one_line(done, 2, f"{option}: {tmp_path / name}")
    assert (tmp_path / name).read_bytes() == before
    assert (tmp_path / "link").is_symlink()


def test_jobs_with_equal_names_and_too_many_jobs_are_refused_before_reading(
    home: Path, tmp_path: Path
) -> None:
    job = write(tmp_path, data={"uri": "nowhere.csv"})
    one_line(run("plan", job, job, "--json"), 2, "jobs: got bad, bad; allowed: different names")
    too_many = [job] * (MOST_JOBS + 1)
    one_line(
        run("plan", *too_many, "--json"),
        2,
        f"jobs: got {MOST_JOBS + 1}; allowed: at most {MOST_JOBS}",
    )


def test_a_structure_without_operations_is_refused(home: Path, tmp_path: Path) -> None:
    (tmp_path / "narrow.py").write_text(
        MODELS["narrow.py"] + "\n\ndef example_batch(n):\n    import torch\n"
        "    return torch.rand(n, 64), torch.zeros(n).long()\n"
    )
    extracted = run("extract", str(tmp_path / "narrow.py"), "--json")
    path = tmp_path / "structure.json"
    path.write_text(json.dumps(json.loads(extracted.stdout) | {"trace": [], "operations": {}}))
    for device_type in ("cpu", "nvidia-t4", "emulated"):
        given = ["--batch-size", "8", "--device-type", device_type]
        one_line(run("estimate", str(path), *given, "--json"), 2, "structure: its trace is empty")


def test_a_job_that_is_late_even_alone_is_not_reported_as_competing(
    home: Path, tmp_path: Path
) -> None:
    pool = tmp_path / "pool.yaml"
    pool.write_text(
        "name: p\nhosts: [{name: h, address: 10.0.0.1, devices: [{type: nvidia-t4}]}]\n"
    )
    (tmp_path / "linear.py").write_text(
        "from torch.nn import *\n\n\ndef build_model():\n"
        "    return Sequential(Flatten(), Linear(64, 10))\n"
    )
    jobs = []
    for name, deadline in (("easy", "1h"), ("hurried", "1ms")):
        write(
            tmp_path,
            name=name,
            model={"source": "linear.py"},
            objective={"minimize": "time", "deadline": deadline},
        )
        jobs.append(str((tmp_path / "job.yaml").rename(tmp_path / f"{name}.yaml")))
    done = run("plan", *jobs, "--pool", str(pool), "--json")
    one_line(done, 3, "job hurried, even alone: no feasible plan: the deadline of 0.001 s binds")
    assert "with the others" not in done.stderr
    error = json.loads(done.stdout)["error"]
    assert list(error["late_alone"]) == error["slips"] == ["hurried"]
    assert [one["job"] for one in error["plan"]["jobs"] if not one["slips"]] == ["easy"]
