"""Containers on hosts of a lab, by podman with this machine's root file system."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from lab import Lab

from trainwright.tasks.spec.container_spec import Container
from trainwright.tasks.train import TrainRequest
from trainwright.tasks.train.hosts.container import contained

_BUSY = """
import sys, time
begin, own = time.monotonic(), time.process_time()
while time.monotonic() - begin < float(sys.argv[1]):
    pass
print((time.process_time() - own) / (time.monotonic() - begin))
"""
_TOUCH = """
import resource, sys
step, held = 1 << 20, []
own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
for count in range(1, 1 << 20):
    held.append(bytearray(step))
    held[-1][::4096] = b"x" * (step // 4096)
    print(own + count * step, flush=True)
"""


def contain(asked: TrainRequest, container: dict[str, Any]) -> None:
    """Have the hosts of a training's pool file run their processes in containers."""
    path = Path(str(asked.job.pool))
    pool = json.loads(path.read_text())
    pool["container"] = container
    for host in pool["hosts"]:
        host["python"] = sys.executable
    path.write_text(json.dumps(pool))


def _settings(made: Lab) -> list[str]:
    return ["env", f"CONTAINERS_CONF={made.folder}/containers.conf"]


def kill_container(made: Lab, number: int) -> None:
    """Kill the first process of the container on a host, and with it all others in it."""
    for pid in made.hosts[number].pids():
        if b"/conmon\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            os.kill(int(children[-1]), signal.SIGKILL)
            return
    raise AssertionError(made.hosts[number].words())


def _run(made: Lab, container: Container, *words: str) -> subprocess.CompletedProcess[str]:
    command = contained(container, [sys.executable, "-c", *words])
    return subprocess.run(
        made.hosts[0].inside(*_settings(made), *command),
        capture_output=True,
        text=True,
        check=False,
    )


def busy_cores(made: Lab, cpus: float, seconds: float = 4.0) -> float:
    """The CPUs that a busy process gets in a container with these."""
    done = _run(made, Container(image="/:O", cpus=cpus), _BUSY, str(seconds))
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


def touched_bytes(made: Lab, memory_bytes: int) -> int:
    """The memory that a process in a container with so much has when it is killed."""
    done = _run(made, Container(image="/:O", memory=f"{memory_bytes // 2**20}MiB"), _TOUCH)
    assert done.returncode == 137, (done.returncode, done.stderr)
    return int(done.stdout.splitlines()[-1])
