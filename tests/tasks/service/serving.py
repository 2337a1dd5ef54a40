"""A real `trainwright serve` for tests, and requests for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

RUN, READ = "run-token-for-tests-0", "read-token-for-tests-0"
JOBS = Path(__file__).parents[3] / "dags" / "jobs"
SPEC = {
    "inputs": {"inputs": [1, 8, 8]},
    "input_dtypes": {"inputs": "float32"},
    "target_dtype": "int64",
    "classes": 10,
    "task": "image-classification",
}
POOL = {
    "name": "sent",
    "hosts": [
        {"name": "a", "address": "10.0.0.1", "devices": [{"type": "nvidia-t4", "count": 2}]},
        {"name": "b", "address": "10.0.0.2", "devices": [{"type": "nvidia-a10"}]},
    ],
    "prices": {"nvidia-t4": "0.35/h", "nvidia-a10": "1.0/h", "energy": "0.25/kWh"},
}
JOB: dict[str, Any] = {
    "name": "sent",
    "pool": POOL,
    "data": {"uri": "builtin:digits"},
    "objective": {"minimize": "cost"},
}


def model(text: str, **config: Any) -> dict[str, Any]:
    """A model sent as text."""
    return {"source": "model.py", "files": {"model.py": text}, "config": config}


@contextmanager
def serving(home: Path, *options: str) -> Iterator[str]:
    """The address of a service that runs until the block ends."""
    environment = os.environ | {
        "TRAINWRIGHT_HOME": str(home),
        "TRAINWRIGHT_STORE": f"file://{home / 'store'}",
        "TRAINWRIGHT_SERVICE_TOKEN": RUN,
        "TRAINWRIGHT_SERVICE_READ_TOKEN": READ,
        "SECRET_OF_THE_SERVER": "seen",
    }
    command = [
        sys.executable,
        "-m",
        "trainwright.tasks.cli.main",
        "serve",
        "--port",
        "0",
        "--json",
        *options,
    ]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            text = ""
            assert process.stdout is not None
            for line in process.stdout:
                text += line
                if line == "}\n":
                    break
            yield json.loads(text)["address"]
        finally:
            process.terminate()
            code = process.wait(120)
        assert code == 130  # a regular shutdown


def client(address: str, token: str = RUN) -> httpx.Client:
    """A client with a token."""
    return httpx.Client(base_url=address, headers={"Authorization": f"Bearer {token}"}, timeout=200)
