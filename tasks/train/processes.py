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

# What an outer launcher, another training or the scheduler has set is not for the ranks.
_SCRUBBED = (
    "AIRFLOW", "_AIRFLOW", "GLOO_", "HOROVOD_", "KMP_", "MASTER_", "MKL_", "OMPI_", "OMP_", "PMI", "TORCHELASTIC_",
    "LOCAL_RANK", "RANK", "WORLD_SIZE",
)  # fmt: skip
SPARE = "spare"


@dataclass(eq=False)
class Worker:
    """A process that is the rank of a device, or waits for one (`number` is None)."""

    number: int | None
    process: subprocess.Popen[bytes]
    channel: LauncherChannel
    log: Path
    state: Literal["starting", "free", "joining", "in"] = "starting"
    step: int | None = None
    """steps finished, as it said when it was free last"""
    done: dict[str, Any] | None = None
    """its last words"""
    error: dict[str, Any] | None = None
    heard_at: float = field(default_factory=time.monotonic)
    waits_s: float | None = None
    """how long it has waited for others, by its last sign of life"""
    writing: bool = False
    lost_because: str | None = None
    """why the launcher has killed it"""

    def heard(self, message: dict[str, Any]) -> None:
        """Take note of a sign of life."""
        self.waits_s, self.writing = message["waits_s"], message["writing"]

    def kill(self) -> None:
        """End it, with what the model's code has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def starved(self, oom_kills: int) -> bool:
        """Whether the kernel has killed it for want of memory, as far as can be told from outside."""
        return self.process.wait() == -signal.SIGKILL and oom_kills > 0 and self.lost_because is None

    def how_it_ended(self, oom_kills: int) -> str:
        """What to say of its end. `oom_kills`: how many processes the kernel has killed for memory meanwhile."""
        code = self.process.wait()
        if self.lost_because is not None:
            return self.lost_because
        if self.starved(oom_kills):
            return "was killed by SIGKILL, most likely by the kernel for want of memory"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"


def start_worker(order: Path, number: int | None, *, slot: int, threads: int, log: Path) -> Worker:
    """Start the process of a rank, or a spare one, on this machine. It dies with the calling thread."""
    channel = LauncherChannel()
    descriptor = channel.other_end.fileno()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_SCRUBBED)}
    environment |= {
        "PYTHONUNBUFFERED": "1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": str(threads), VARIABLE: str(descriptor),
        "HOROVOD_RANK": str(slot),
    }  # fmt: skip
    place = SPARE if number is None else str(number)
    command = dying_with_parent([sys.executable, "-m", "trainwright.tasks.train.worker", str(order), place])
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, env=environment, pass_fds=[descriptor], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
    channel.other_end.close()
    return Worker(number, process, channel, log)


def kernel_oom_kills() -> int:
    """How many processes the kernel has killed for want of memory since it started; 0 where it does not say."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def together(earlier: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """What two processes of one device have used."""
    return {
        "peak_memory_bytes": max(earlier.get("peak_memory_bytes", 0), later.get("peak_memory_bytes", 0)),
        "cpu_s": earlier.get("cpu_s", 0.0) + later.get("cpu_s", 0.0),
    }


def from_rank(rank: int, device: str, document: dict[str, Any], log: Path) -> TrainwrightError:
    """What a rank said, as an error that names it. Bad input, and a lost lease, read the same from every rank."""
    error = from_document(document)
    if error.exit_code != TrainingFailed.exit_code or isinstance(error, RunHeld):
        return error
    return TrainingFailed(f"rank {rank} ({device}): {error}; its log is {log}", rank=rank, **error.details)
