"""One rank's process, seen from the launcher: its start, channel, report and end.

Loads no torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright.infra.process import dying_with_parent
from trainwright.tasks.errors import RunHeld, TrainingFailed, TrainwrightError, from_document
from trainwright.tasks.train.channel import VARIABLE, LauncherChannel
from trainwright.tasks.train.hosts.remote_rank import RemoteRank

# Variables that ranks must not inherit: those of an outer launcher, another training or Airflow,
# and credentials, because ranks run the user's model, and only the launcher uses store and ledger.
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
    "TRAINWRIGHT_KUBERNETES_",
    "TRAINWRIGHT_LEDGER",
    "TRAINWRIGHT_S3_",
    "TRAINWRIGHT_SERVICE_",
    "TRAINWRIGHT_SSH_",
    "LOCAL_RANK",
    "RANK",
    "WORLD_SIZE",
)
CUDA_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
"""Settings of torch's CUDA allocator; those that the launcher was started with count."""
SPARE = "spare"
"""A spare process's argument in place of a device number."""
Message = dict[str, Any]


@dataclass(frozen=True)
class Usage:
    """Memory and CPU time that a process has used."""

    peak_memory_bytes: float = 0.0
    cpu_s: float = 0.0

    @staticmethod
    def of(message: Message) -> Usage:
        """From a rank's message."""
        return Usage(message["peak_memory_bytes"], message["cpu_s"])

    def then(self, later: Usage) -> Usage:
        """The usage of two successive processes of one device."""
        return Usage(max(self.peak_memory_bytes, later.peak_memory_bytes), self.cpu_s + later.cpu_s)


@dataclass(eq=False)
class RankProcess:
    """The process of a device, or a spare process (`number` is None)."""

    number: int | None
    process: subprocess.Popen[bytes] | RemoteRank
    channel: LauncherChannel
    log: Path
    done: Message | None = None
    """its final report"""
    error: Message | None = None
    """the error it reported"""
    usage: Usage = Usage()
    """as of its last heartbeat"""
    kill_reason: str | None = None

    def kill(self, reason: str | None = None) -> None:
        """End the process and its children, also those that the model's code started."""
        self.kill_reason = self.kill_reason or reason
        if isinstance(self.process, RemoteRank):
            self.process.kill()
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def out_of_memory(self, oom_kills: int) -> bool:
        """Whether the kernel has probably killed the process to free memory.

        `oom_kills`: how many processes this machine's kernel has killed for lack of memory since.
        """
        if isinstance(self.process, RemoteRank):
            oom_kills = self.process.oom_kills
        killed = self.process.wait() == -signal.SIGKILL and self.kill_reason is None
        return killed and oom_kills > 0

    def how_it_ended(self, oom_kills: int) -> str:
        """The end in words; `oom_kills` as in `out_of_memory`."""
        code = self.process.wait()
        if isinstance(self.process, RemoteRank) and self.process.lost is not None:
            return f"is lost: {self.process.lost}"
        if self.kill_reason is not None:
            return self.kill_reason
        if self.out_of_memory(oom_kills):
            return "was killed by SIGKILL, most likely by the kernel for lack of memory"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"


def start_process(
    order: Path,
    number: int | None,
    *,
    slot: int,
    threads: int,
    log: Path,
    interface: dict[str, str],
) -> RankProcess:
    """Start the process of a device, or a spare one, on this machine. It dies with this thread.

    `interface` holds the variables that name the interface to the other ranks.
    """
    channel = LauncherChannel()
    descriptor = channel.other_end.fileno()
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(_SCRUBBED)
    }
    environment |= own_environment(slot, threads) | interface | {VARIABLE: str(descriptor)}
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
    return RankProcess(number, process, channel, log)


def own_environment(slot: int, threads: int) -> dict[str, str]:
    """The environment variables of a rank, on any machine.

    Of the memory's settings, those of malloc are set by the rank itself (`memory.freed_memory`).
    """
    return {
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(threads),
        "HOROVOD_RANK": str(slot),
        # Segments that grow leave no holes, so that the planned peak is about what is reserved.
        CUDA_ALLOCATOR: os.environ.get(CUDA_ALLOCATOR, "expandable_segments:True"),
    }


def error_of_rank(rank: int, device: str, document: Message, log: Path) -> TrainwrightError:
    """A rank's error, with the rank's name unless it is bad input or a lost lease."""
    error = from_document(document)
    if error.exit_code != TrainingFailed.exit_code or isinstance(error, RunHeld):
        return error
    return TrainingFailed(
        f"rank {rank} ({device}): {error}; its log is {log}", rank=rank, **error.details
    )
