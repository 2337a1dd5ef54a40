"""The process of a rank, as the launcher has it: its start, its channel, what it said last, its end. Loads no torch."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trainwright.infra.process import dying_with_parent
from trainwright.tasks.errors import RunHeld, TrainingFailed, TrainwrightError, from_document
from trainwright.tasks.train.channel import VARIABLE, LauncherChannel
from trainwright.tasks.train.hosts.remote_rank import RemoteRank

# What an outer launcher, another training or the scheduler has set is not for the ranks.
_SCRUBBED = (
    "AIRFLOW",
    "_AIRFLOW",
    "GLOO_",
    "HOROVOD_",
    "KMP_",
    "MASTER_",
    "MKL_",
    "OMPI_",
    "OMP_",
    "PMI",
    "TORCHELASTIC_",
    "LOCAL_RANK",
    "RANK",
    "WORLD_SIZE",
)
SPARE = "spare"


@dataclass(eq=False)
class Worker:
    """A process that is the rank of a device, or waits for one (`number` is None)."""

    number: int | None
    process: subprocess.Popen[bytes] | RemoteRank
    channel: LauncherChannel
    log: Path
    state: Literal["starting", "loaded", "free", "joining", "in"] = "starting"
    """`loaded`: a spare one that waits for a device"""
    step: int | None = None
    """steps finished, as it said when it was free last"""
    done: dict[str, Any] | None = None
    """its last words"""
    error: dict[str, Any] | None = None
    heard_at: float = field(default_factory=time.monotonic)
    waits_s: float | None = None
    """how long it has waited for others, by its last sign of life"""
    computes_s: float | None = None
    """how long it has been at its part of a step, likewise"""
    writing: bool = False
    lost_because: str | None = None
    """why the launcher has killed it"""

    def heard(self, message: dict[str, Any]) -> None:
        """Take note of a sign of life."""
        self.waits_s, self.computes_s, self.writing = (
            message["waits_s"],
            message["computes_s"],
            message["writing"],
        )

    def kill(self) -> None:
        """End it, with what the model's code has started."""
        if isinstance(self.process, RemoteRank):
            self.process.kill()
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def give_up(self, why: str) -> None:
        """Kill it, and say why, unless that was done."""
        if self.lost_because is None:
            self.lost_because = why
            self.kill()

    def starved(self, oom_kills: int) -> bool:
        """Whether the kernel has killed it for want of memory, as far as can be told from outside."""
        killed = self.process.wait() == -signal.SIGKILL and self.lost_because is None
        if isinstance(self.process, RemoteRank):
            return killed and self.process.oom_kills > 0
        return killed and oom_kills > 0

    def how_it_ended(self, oom_kills: int) -> str:
        """What to say of its end. `oom_kills`: how many processes the kernel here has killed for memory meanwhile."""
        code = self.process.wait()
        if isinstance(self.process, RemoteRank) and self.process.lost is not None:
            return f"is lost: {self.process.lost}"
        if self.lost_because is not None:
            return self.lost_because
        if self.starved(oom_kills):
            return "was killed by SIGKILL, most likely by the kernel for want of memory"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"


def start_worker(
    order: Path, number: int | None, *, slot: int, threads: int, log: Path, way: dict[str, str]
) -> Worker:
    """Start the process of a rank, or a spare one, on this machine. It dies with the calling thread.

    `way` holds the variables that say by which interface it reaches the others.
    """
    channel = LauncherChannel()
    descriptor = channel.other_end.fileno()
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(_SCRUBBED)
    }
    environment |= own_environment(slot, threads) | way | {VARIABLE: str(descriptor)}
    place = SPARE if number is None else str(number)
    command = dying_with_parent(
        [sys.executable, "-m", "trainwright.tasks.train.worker.entry", str(order), place]
    )
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    channel.other_end.close()
    return Worker(number, process, channel, log)


def own_environment(slot: int, threads: int) -> dict[str, str]:
    """What is set for a rank, wherever it runs."""
    return {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(threads), "HOROVOD_RANK": str(slot)}


def together(earlier: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """What two processes of one device have used."""
    return {
        "peak_memory_bytes": max(
            earlier.get("peak_memory_bytes", 0), later.get("peak_memory_bytes", 0)
        ),
        "cpu_s": earlier.get("cpu_s", 0.0) + later.get("cpu_s", 0.0),
    }


def from_rank(rank: int, device: str, document: dict[str, Any], log: Path) -> TrainwrightError:
    """What a rank said, as an error that names it. Bad input, and a lost lease, read the same from every rank."""
    error = from_document(document)
    if error.exit_code != TrainingFailed.exit_code or isinstance(error, RunHeld):
        return error
    return TrainingFailed(
        f"rank {rank} ({device}): {error}; its log is {log}", rank=rank, **error.details
    )
