"""Bad input at the command line: one clear line, the documented exit code, nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

TRAINWRIGHT = [sys.executable, "-m", "trainwright.tasks.cli"]
MODELS = {
    "none.py": "x = 1\n",
    "raises.py": "def build_model():\n    raise ValueError('no width')\n",
    "nomodule.py": "def build_model():\n    return 3\n",
    "narrow.py": "from torch.nn import *\n\n\ndef build_model():\n    return Sequential(Flatten(), Linear(64, 4))\n",
    "broken.py": "def build_model(:\n",
}


def run(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TRAINWRIGHT, *args], capture_output=True, text=True, env=os.environ | environment, timeout=200, check=False
    )


def write(folder: Path, **changes: object) -> str:
    values: dict[str, object] = {"name": "bad", "data": {"uri": "builtin:digits"}, "model": {"source": "narrow.py"}}
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
        (["estimate", "x.py", "--batch-size", "many", "--device-type", "cpu"], "'--batch-size'"),
        (["show", "nonsense", "--store", "file:///nowhere"], "run: got 'nonsense'"),
        (["runs", "--store", "ftp://x"], "store: got 'ftp://x'"),
    ],
)
def test_wrong_arguments(home: Path, args: list[str], says: str) -> None:
    one_line(run(*args, "--json"), 2, says)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("missing.py", "there is no such file"),
        ("none.py", "defines no function build_model"),
        ("raises.py", "raised ValueError: no width"),
        ("nomodule.py", "returned a int; allowed: a torch.nn.Module"),
        ("narrow.py", "4"),
        ("broken.py", "SyntaxError"),
    ],
)
def test_a_wrong_model(home: Path, tmp_path: Path, source: str, says: str) -> None:
    one_line(run("plan", write(tmp_path, model={"source": source}), "--json"), 2, says)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"uri": "builtin:letters"}, "builtin:digits"),
        ({"uri": "nowhere.csv"}, "nowhere.csv"),
        ({"uri": "table.csv", "target": "price"}, "price"),
        ({"uri": "ftp://x/y.csv"}, "ftp://"),
    ],
)
def test_wrong_data(home: Path, tmp_path: Path, data: dict[str, str], says: str) -> None:
    (tmp_path / "table.csv").write_text("a,label\n1,x\n2,y\n")
    one_line(run("validate", write(tmp_path, data=data), "--json"), 2, says)


def test_an_s3_server_that_is_down_is_4_and_says_how_to_start_it(home: Path, tmp_path: Path) -> None:
    keys = {"TRAINWRIGHT_S3_ACCESS_KEY": "a", "TRAINWRIGHT_S3_SECRET_KEY": "very-secret"}
    done = run("run", write(tmp_path), "--json", TRAINWRIGHT_S3_ENDPOINT="http://127.0.0.1:9", **keys)
    one_line(done, 4, "trainwright up")
    assert "very-secret" not in done.stdout + done.stderr
    one_line(run("runs", "--json"), 4, "trainwright up")


def test_wrong_credentials_are_4_and_the_secret_is_not_shown(stack: Path, tmp_path: Path) -> None:
    from trainwright.infra.local import s3_access

    environment = {
        "TRAINWRIGHT_S3_ENDPOINT": s3_access(stack).endpoint,
        "TRAINWRIGHT_S3_ACCESS_KEY": "someone",
        "TRAINWRIGHT_S3_SECRET_KEY": "very-secret",
    }
    done = run("run", write(tmp_path), "--json", **environment)
    one_line(done, 4, "refused the credentials")
    assert "very-secret" not in done.stdout + done.stderr


def test_help_names_the_commands_and_loads_nothing_heavy(home: Path) -> None:
    done = run("--help")
    assert done.returncode == 0
    assert "search-lr" in done.stdout
    heavy = "torch numpy pandas pyarrow dask sqlalchemy minio airflow great_expectations scipy"
    code = "import sys, trainwright.tasks.cli; print([m for m in sys.argv[1].split() if m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code, heavy], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"
