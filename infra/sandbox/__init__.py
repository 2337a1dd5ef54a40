"""The sandbox, in which users' code is traced. (The ranks of a training run it without a sandbox.)

`client` starts a `fork_server`, a process that has imported the necessary modules and forks a child
for each request. That child is the supervisor (`supervise`): it runs a function `inside` a limited
process, which can access only what `confine` or, without namespaces, `fallback` allows.
"""

from __future__ import annotations

import json
import signal
from dataclasses import asdict, dataclass, replace
from typing import Literal

Protection = Literal["own namespaces", "Landlock and audit hook", "audit hook", "none"]
Stop = Literal["time", "memory", "processes", "disk", "client"]


@dataclass(frozen=True)
class SandboxLimits:
    """The resources that sandboxed code may use."""

    timeout_s: float
    memory_bytes: int
    """address space of each process, and total resident memory of all processes"""
    processes: int = 64
    disk_bytes: int = 256 * 2**20
    """total size of all files, and size of the answer"""

    def memory_words(self) -> str:
        """The limit of memory in GiB, without an exponent: `0.5 GiB`."""
        return f"{self.memory_bytes / 2**30:,.6f}".rstrip("0").rstrip(".") + " GiB"


@dataclass(frozen=True)
class Outcome:
    """How a function in a sandbox ended."""

    protection: Protection
    stopped_by: Stop | None = None
    """the limit that stopped it; `client`: the client disconnected"""
    exit_code: int | None = None
    """its process's exit code, negative for a signal; None if it was stopped"""
    children: int = 0
    """number of its child processes that still ran when it was stopped"""
    last_line: str = ""
    """the last line of its output"""
    answer: bytes = b""
    """the function's return value; empty if it did not return"""

    def to_bytes(self) -> bytes:
        """One line of JSON, followed by the answer."""
        head = {name: value for name, value in asdict(self).items() if name != "answer"}
        return json.dumps(head).encode() + b"\n" + self.answer

    @staticmethod
    def from_bytes(data: bytes) -> Outcome:
        """The inverse of `to_bytes`. Raises OSError if the data is an error of the sandbox."""
        head, _, answer = data.partition(b"\n")
        values = json.loads(head or '{"error": "the supervisor was killed"}')
        if "error" in values:
            raise OSError(f"sandbox: {values['error']}")
        return replace(Outcome(**values), answer=answer)

    def failure(self, limits: SandboxLimits) -> str:
        """Why there is no answer, as the end of a sentence: "the work …"."""
        memory = f"allowed: {limits.memory_words()}"
        last = f": {self.last_line}" if self.last_line else ""
        late = f"did not end within {limits.timeout_s:g} s"
        if self.stopped_by == "memory" or names_memory(self.last_line):
            also = f" and {late}" if self.stopped_by == "time" else ""
            return f"took too much memory{also}{last}; {memory}"
        if self.stopped_by == "time":
            waits = f" ({self.children} process(es) that it had started still ran)"
            said = f"; its last output{last}" if last else ""
            return late + (waits if self.children else "") + said
        if self.stopped_by == "processes":
            return f"started more than the {limits.processes} processes allowed{last}"
        if self.stopped_by == "disk":
            return f"wrote more than the {limits.disk_bytes / 2**20:g} MiB allowed{last}"
        if self.exit_code == -signal.SIGKILL:
            return f"was killed, perhaps by the kernel for lack of memory; {memory}"
        if self.exit_code is not None and self.exit_code < 0:
            return f"crashed with signal {-self.exit_code}{last}"
        if self.exit_code == 0:
            return f"ended its process without an answer{last}"
        return f"ended its process with exit code {self.exit_code}{last}"


def names_memory(text: str) -> bool:
    """Whether an error's text reports a failed allocation of memory."""
    signs = ("MemoryError", "bad_alloc", "allocate memory", "memory allocation")
    return any(sign in text for sign in signs)
