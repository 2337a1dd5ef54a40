"""Models that can't be traced, on the command line: one clear line, exit code 2, nothing left
behind.

More errors of models are in `tests/tasks/test_extract.py`, attacks in `test_hostile_models.py`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import doors
import psutil
import pytest
from command_line import TRAINWRIGHT, process, run

from trainwright.tasks.runs.run import list_runs

HEAD = """
import os, subprocess, sys, time, torch
from torch import nn
def example_batch(n): return torch.rand(n, 4), torch.zeros(n).long()
"""
SLEEP = "90909.5"
"""the sleep time of the endless models' child, by which a test finds it"""
NEVER = "print('reached', flush=True)\n{indent}subprocess.run(['sleep', {sleep!r}])"
FORWARD = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 2)
    def forward(self, x):
        {does}
        return self.head(x)
build_model = Model
"""
ENDLESS = {
    "imported": NEVER.format(indent="", sleep=SLEEP),
    "built": "def build_model():\n    " + NEVER.format(indent="    ", sleep=SLEEP),
    "run": FORWARD.format(does=NEVER.format(indent="        ", sleep=SLEEP)),
}
LINEAR = "def build_model(): return nn.Linear(4, 2)\n"


def _source(folder: Path, code: str) -> str:
    (folder / "model.py").write_text(HEAD + textwrap.dedent(code))
    return str(folder / "model.py")


def _extract(folder: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run("extract", _source(folder, code), "--json", **environment)


def _refused(done: subprocess.CompletedProcess[str], says: str) -> None:
    assert done.returncode == 2, done.stderr
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("trainwright: ")
    assert says in line
    assert "Traceback" not in done.stderr
    assert json.loads(done.stdout)["error"] == {
        "kind": "bad_input",
        "message": line.removeprefix("trainwright: "),
    }


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's own temporary folder, which must be empty at the end."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)


@pytest.fixture(scope="module")
def endless(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[Path, subprocess.CompletedProcess[str]]]:
    """Models that never return, at three places, traced in parallel: folder and result of each."""

    def traced(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
        temporary = folder / "temporary"
        temporary.mkdir()
        own = {
            "TMPDIR": str(temporary),
            "TRAINWRIGHT_HOME": str(folder / "home"),
            "TRAINWRIGHT_EXTRACT_TIMEOUT_S": "10",
        }
        return process("extract", _source(folder, code), "--json", **own)

    folders = [tmp_path_factory.mktemp(place) for place in ENDLESS]
    with ThreadPoolExecutor(len(ENDLESS)) as pool:
        ended = list(pool.map(traced, folders, ENDLESS.values()))
    return dict(zip(ENDLESS, zip(folders, ended, strict=True), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("place", ENDLESS)
def test_a_model_that_never_returns(
    endless: dict[str, tuple[Path, subprocess.CompletedProcess[str]]], place: str
) -> None:
    folder, done = endless[place]
    _refused(
        done,
        "model: tracing model.py did not end within 10 s (1 process(es) that it had started still "
        "ran); its last output: reached; TRAINWRIGHT_EXTRACT_TIMEOUT_S raises the limit",
    )
    assert not _running()
    assert list((folder / "temporary").iterdir()) == []


@pytest.mark.parametrize(
    "code",
    [
        # reads its values, so it runs with real tensors; then it is too large
        pytest.param(
            FORWARD.format(does="x = x if x.sum().item() > 9 else x + torch.ones(2**38).sum()"),
            id="tensor",
        ),
        pytest.param(
            "import numpy\ndef build_model():\n    x = numpy.ones(2**38)\n    return x",
            id="numpy",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            FORWARD.format(does="kept = [bytearray(2**28) for _ in range(2**10)]"),
            id="bit by bit",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_model_that_needs_more_memory_than_there_is(
    home: Path, tmp_path: Path, code: str
) -> None:
    done = _extract(tmp_path, code, TRAINWRIGHT_EXTRACT_MEMORY_GIB="3")
    _refused(done, "allowed: 3 GiB; TRAINWRIGHT_EXTRACT_MEMORY_GIB raises the limit")
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (FORWARD.format(does="os.abort()"), "crashed with signal 6"),
        ("def build_model(): os._exit(0)", "ended its process without an answer"),
        (FORWARD.format(does="sys.exit(3)"), "ended its process with exit code 3"),
        (
            "def build_model():\n    made = nn.Linear(4, 2)\n    return made.requires_grad_(False)",
            "model: has no parameters to train",
        ),
        (
            LINEAR + "def loss(outputs, targets): return 0.5",
            "loss: returned float; allowed: a scalar tensor",
        ),
        (
            LINEAR + "def loss(outputs, targets): return None",
            "loss: returned NoneType; allowed: a scalar tensor",
        ),
    ],
)
def test_a_model_that_is_missing_or_ends_its_process(
    home: Path, tmp_path: Path, code: str, says: str
) -> None:
    _refused(_extract(tmp_path, code), says)
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.parametrize(
    ("name", "most"),
    [("TRAINWRIGHT_EXTRACT_TIMEOUT_S", "86,400"), ("TRAINWRIGHT_EXTRACT_MEMORY_GIB", "1,048,576")],
)
@pytest.mark.parametrize("value", ["0", "-3", "soon", "nan", "inf", "1e9"])
def test_an_invalid_limit(home: Path, tmp_path: Path, name: str, most: str, value: str) -> None:
    _refused(
        _extract(tmp_path, LINEAR, **{name: value}),
        f"{name}: got '{value}'; allowed: a number above 0, at most {most}",
    )


def test_a_models_error_can_not_send_control_codes_to_the_terminal(tmp_path: Path) -> None:
    done = _extract(tmp_path, "def build_model(): raise ValueError('a\\x1b[31mb\\x07')")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.endswith("raised ValueError: a?[31mb? (model.py, line 5)\n")


@pytest.mark.parametrize("to_all", [False, True], ids=["the command", "its process group"])
def test_a_terminated_command_leaves_nothing(tmp_path: Path, to_all: bool) -> None:
    command = [
        *TRAINWRIGHT,
        "extract",
        _source(tmp_path, ENDLESS["built"]),
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    _until(lambda: bool(_running()))
    os.killpg(process.pid, signal.SIGTERM) if to_all else process.terminate()
    assert process.communicate(timeout=60)[1].splitlines()[-1] == "trainwright: interrupted"
    assert process.returncode == 130
    assert not _running()
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_training_stopped_during_the_trace_is_interrupted(tmp_path: Path, home: Path) -> None:
    _source(tmp_path, ENDLESS["built"])
    job = tmp_path / "job.json"
    job.write_text(
        json.dumps(
            {"name": "told", "data": {"uri": "builtin:digits"}, "model": {"source": "model.py"}}
        )
    )
    command = [*TRAINWRIGHT, "train", str(job), "--store", (tmp_path / "store").as_uri(), "--json"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    _until(lambda: bool(_running()))
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    document = json.loads(out)
    assert (process.returncode, document["state"]) == (130, "interrupted"), err
    assert (
        next(iter(list_runs((tmp_path / "store").as_uri(), doors.settings()))).status().state
        == "interrupted"
    )


def _running() -> list[psutil.Process]:
    """The processes that the endless models have started."""
    every = psutil.process_iter(["cmdline"])
    return [one for one in every if SLEEP in (one.info["cmdline"] or ())]


def _until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)
