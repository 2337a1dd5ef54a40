"""trainwright as its users see it: the installed command in a process, files in, files out.

Nothing here imports trainwright, so tests that use only this hold however its modules are cut.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml

COMMAND = str(Path(sys.executable).with_name("trainwright"))
LONGEST_S = 400
"""for one command, on a machine that does other things too"""


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int
    out: str
    err: str

    def document(self) -> dict[str, Any]:
        """The one JSON document on its standard output."""
        parsed = json.loads(self.out)
        assert isinstance(parsed, dict), parsed
        return parsed


class Outside:
    """A folder with a trainwright home, a store and input files, in which commands run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home, self.store = folder / "home", folder / "store"
        self.store.mkdir(parents=True)

    def environment(self, **more: str) -> dict[str, str]:
        """The caller's environment, without what would lead elsewhere, with this home and store."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("TRAINWRIGHT_", "AIRFLOW_"))
        }
        own = {"TRAINWRIGHT_HOME": str(self.home), "TRAINWRIGHT_STORE": self.store.as_uri()}
        return {**kept, **own, **more}

    def run(self, *args: str, **environment: str) -> Ended:
        """`trainwright ARGS` in this folder."""
        done = subprocess.run(
            [COMMAND, *args],
            cwd=self.folder,
            env=self.environment(**environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LONGEST_S,
            check=False,
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    def done(self, *args: str, **environment: str) -> dict[str, Any]:
        """What `trainwright ARGS --json` prints. Raises AssertionError if it fails."""
        ended = self.run(*args, "--json", **environment)
        assert ended.code == 0, (args, ended)
        return ended.document()

    @contextmanager
    def started(self, *args: str) -> Iterator[subprocess.Popen[str]]:
        """The same command while it runs; if it still does at the end, it is stopped."""
        process = subprocess.Popen(
            [COMMAND, *args],
            cwd=self.folder,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                interrupt(process)
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()

    def write(self, name: str, content: object) -> Path:
        """A file of this folder: text as it is, anything else as YAML."""
        path = self.folder / name
        if not isinstance(content, str):
            apart = json.loads(json.dumps(content))  # no two parts the same object: no YAML aliases
            content = yaml.safe_dump(apart, sort_keys=False)
        path.write_text(content)
        return path

    def runs(self, job: str) -> list[Path]:
        """The folders of a job's runs, newest first."""
        folder = self.store / "runs" / job
        return sorted(folder.iterdir(), reverse=True) if folder.is_dir() else []


def interrupt(process: subprocess.Popen[str]) -> Ended:
    """Ctrl-C for this process, and what it ended with; it is killed if it does not end."""
    process.send_signal(signal.SIGINT)
    try:
        out, err = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
    return Ended(process.returncode, out, err)


def folder_of(uri: str) -> Path:
    """The folder that a file:// URI names."""
    return Path(uri.removeprefix("file://"))


def wait_until(what: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait until this holds. Raises AssertionError if the process ends, or it takes too long."""
    until = time.monotonic() + LONGEST_S
    while not what():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until, "waited too long"
        time.sleep(0.05)


def read(path: Path) -> dict[str, Any]:
    """A JSON artefact."""
    parsed = json.loads(path.read_text())
    assert isinstance(parsed, dict)
    return parsed


def rows(run: Path, kind: str) -> list[dict[str, Any]]:
    """What a run recorded of this kind under metrics/, by step."""
    parts = sorted((run / "metrics").glob(f"{kind}-*.parquet"))
    found = [row for part in parts for row in pq.read_table(part).to_pylist()]
    return sorted(found, key=lambda row: int(row["step"]))


def pool(*devices: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A pool of one host, this machine, with these devices."""
    hosts = [{"name": "here", "address": "localhost", "devices": list(devices)}]
    return {"name": "golden", "hosts": hosts, **more}


def plan(devices: Sequence[dict[str, Any]], split: Sequence[int], accumulation: int = 1) -> str:
    """A plan file that gives the devices of such a pool these parts of the global batch."""
    numbers: dict[str, int] = {}
    planned = []
    for device, batch_size in zip(devices, split, strict=True):
        index = numbers[device["type"]] = numbers.get(device["type"], -1) + 1
        planned.append(
            {
                "id": f"here/{device['type']}-{index}",
                "type": device["type"],
                "host": "here",
                "address": "localhost",
                "index": index,
                "cores": device.get("cores"),
                "speed": device.get("speed"),
                "batch_size": batch_size,
                "step_time_s": {"median": 0.01, "low": 0.005, "high": 0.02},
                "peak_memory_bytes": 5e8,
            }
        )
    document = {
        "schema_version": 1,
        "feasible": True,
        "objective": "time",
        "devices": planned,
        "global_batch_size": sum(split),
        "steps_per_epoch": 1,
        "epochs": 1,
        "strategy": {"name": "data-parallel"},
        "predicted": None,
        "deadline_s": None,
        "accumulation": accumulation,
        "solve_time_s": 0.0,
    }
    return json.dumps(document, indent=1)
