"""trainwright from outside: the installed command in a process, with input and output files.

This module does not import trainwright, so tests that use only it survive any restructuring.
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
"""for one command on a busy machine"""


@dataclass(frozen=True)
class Ended:
    """The result of a command."""

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
        """The caller's environment, with only this home and store."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("TRAINWRIGHT_", "AIRFLOW_"))
        }
        own = {"TRAINWRIGHT_HOME": str(self.home), "TRAINWRIGHT_STORE": self.store.as_uri()}
        return {**kept, **own, **more}

    def run(self, *args: str, **environment: str) -> Ended:
        """Run `trainwright ARGS` in this folder."""
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
        """The output of `trainwright ARGS --json`. Raises AssertionError if it fails."""
        ended = self.run(*args, "--json", **environment)
        assert ended.code == 0, (args, ended)
        return ended.document()

    @contextmanager
    def started(self, *args: str) -> Iterator[subprocess.Popen[str]]:
        """The command as a running process, which is stopped at the end of the block."""
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
        """Write a file in this folder: text as it is, other values as YAML."""
        path = self.folder / name
        if not isinstance(content, str):
            apart = json.loads(
                json.dumps(content)
            )  # copies shared objects, which YAML would write as aliases
            content = yaml.safe_dump(apart, sort_keys=False)
        path.write_text(content)
        return path

    def runs(self, job: str) -> list[Path]:
        """The folders of a job's runs, newest first."""
        folder = self.store / "runs" / job
        return sorted(folder.iterdir(), reverse=True) if folder.is_dir() else []


def interrupt(process: subprocess.Popen[str]) -> Ended:
    """Send Ctrl-C to a process; its exit code. Kills it if it does not end."""
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
    """Wait for a condition. Raises AssertionError if the process ends, or after a timeout."""
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
    """A run's rows of this kind under metrics/, by step."""
    parts = sorted((run / "metrics").glob(f"{kind}-*.parquet"))
    found = [row for part in parts for row in pq.read_table(part).to_pylist()]
    return sorted(found, key=lambda row: int(row["step"]))


def pool(*devices: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A pool with these devices on this machine."""
    hosts = [{"name": "here", "address": "localhost", "devices": list(devices)}]
    return {"name": "golden", "hosts": hosts, **more}


def plan(devices: Sequence[dict[str, Any]], split: Sequence[int], accumulation: int = 1) -> str:
    """A plan file with these shares of the global batch for the devices of such a pool."""
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
