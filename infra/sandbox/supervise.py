"""Runs a function in a sandbox, enforces its limits, and reports how it ended.

The calling process is the supervisor. It must have only one thread, and can run only one function,
because it enters some of the namespaces itself. Its child is the sandbox's first process, whose
child is the worker (`inside`).

The kernel limits each process: address space, CPU time, file size. The supervisor limits all
processes together: number, resident memory, time. A control group counts all memory, files
included; without the right to make one, memory that belongs to no process is refused. The kernel's
limit on the number of processes does not apply to user 0.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator

from trainwright.infra.sandbox import Outcome, Protection, SandboxLimits, Stop, kernel
from trainwright.infra.sandbox.confine import enter_namespaces, readable_paths
from trainwright.infra.sandbox.inside import SandboxConfig, run_first_process
from trainwright.infra.sandbox.memory_group import memory_group

_LOOK_S = 0.1
_KEPT_BYTES = 4096
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def run(
    work: Callable[[], bytes],
    limits: SandboxLimits,
    protection: Protection,
    *,
    readable: Iterable[str] = (),
    client: int | None = None,
) -> Outcome:
    """Run `work` in a sandbox that may also read the `readable` paths. Its children end with it.

    Closing the other end of the socket `client` stops it. Raises OSError if the protection or a
    limit can't be set up: then `work` did not run.
    """
    os.stat(f"/proc/self/task/{os.getpid()}/children")  # needed for the limits; a kernel option
    paths = [] if protection == "none" else readable_paths(readable)
    with contextlib.ExitStack() as stack:
        folder = group = None
        if protection != "none":
            group = memory_group(limits.memory_bytes + limits.disk_bytes)
        if protection == "own namespaces":
            folder = "/tmp"
            enter_namespaces()
        elif protection != "none":
            folder = tempfile.mkdtemp(prefix="trainwright-sandbox-")
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        kernel.adopt_orphans()
        if group is not None:
            stack.callback(group.remove)
        stack.callback(_end_children)
        config = SandboxConfig(limits, protection, paths, folder, group)
        return _supervised(work, config, client)


def _supervised(work: Callable[[], bytes], config: SandboxConfig, client: int | None) -> Outcome:
    pipes = [os.pipe() for _ in range(3)]
    answer, output, status = readers = [reader for reader, _ in pipes]
    writers = [writer for _, writer in pipes]
    first = os.fork()
    if first == 0:
        run_first_process(work, config, *writers)
    for one in writers:
        os.close(one)
    received = {one: bytearray() for one in readers}
    stopped_by = _watch(config, first, received, status, client)
    if config.group is not None and config.group.exceeded():
        stopped_by = "memory"
    running = len(list(_descendants(first)))
    _end_children()
    for one in readers:  # every writer has ended, so reading ends
        while data := os.read(one, 2**16):
            received[one] += data
        os.close(one)
    said = received[status].decode()
    if said.startswith("!"):
        raise OSError(f"could not be set up: {said[1:]}")
    lines = received[output][-_KEPT_BYTES:].decode(errors="replace").strip().splitlines()
    code = int(said) if said and not stopped_by else None
    return Outcome(
        protection=config.protection,
        stopped_by="time" if code == -signal.SIGXCPU else stopped_by,
        exit_code=code,
        children=max(running - 1, 0),
        last_line=lines[-1][:300] if lines else "",
        answer=bytes(received[answer]) if code == 0 else b"",
    )


def _watch(
    config: SandboxConfig,
    first: int,
    received: dict[int, bytearray],
    status: int,
    client: int | None,
) -> Stop | None:
    """Receive output until the worker's status arrives or a limit is exceeded.

    Returns the exceeded limit.
    """
    limits = config.limits
    poll = select.poll()
    for one in received:
        poll.register(one, select.POLLIN)
    if client is not None:
        poll.register(client, 0)  # no events: hang-ups are always reported
    answer, output, _ = received
    deadline, next_look = time.monotonic() + limits.timeout_s, 0.0
    while not received[status]:
        for ready, _ in poll.poll(1000 * _LOOK_S):
            if ready == client:
                return "client"
            if data := os.read(ready, 2**16):
                received[ready] += data
            elif ready == status:  # something killed the first process
                received[status] += str(-signal.SIGKILL).encode()
            else:
                poll.unregister(ready)
        del received[output][:-_KEPT_BYTES]
        now = time.monotonic()
        if now > deadline:
            return "time"
        if len(received[answer]) > limits.disk_bytes:
            return "disk"
        if now > next_look and config.protection != "none":
            next_look = now + _LOOK_S
            if exceeded := _exceeded(config, first):
                return exceeded
    return None


def _exceeded(config: SandboxConfig, first: int) -> Stop | None:
    """The limit that the sandbox's processes together exceed, if any."""
    limits, processes = config.limits, list(_descendants(first))
    if len(processes) > limits.processes:
        return "processes"
    for memory_bytes in (_resident_bytes, _proportional_bytes):
        if sum(map(memory_bytes, processes)) <= limits.memory_bytes:
            break
    else:
        return "memory"
    if config.protection.endswith("audit hook"):  # otherwise /tmp has a fixed size
        assert config.folder is not None
        if _folder_bytes(config.folder) > limits.disk_bytes:
            return "disk"
    return None


def _descendants(process: int) -> Iterator[int]:
    waiting = [process]
    while waiting:
        parent = waiting.pop()
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            for thread in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{thread}/children") as file:
                    children = [int(one) for one in file.read().split()]
                yield from children
                waiting += children


def _resident_bytes(process: int) -> int:
    """The resident memory of a process; shared pages count for each process."""
    with (
        contextlib.suppress(FileNotFoundError, ProcessLookupError),
        open(f"/proc/{process}/statm") as file,
    ):
        return int(file.read().split()[1]) * _PAGE_BYTES
    return 0


def _proportional_bytes(process: int) -> int:
    """The same, with shared pages divided among processes; much slower to read."""
    with (
        contextlib.suppress(FileNotFoundError, ProcessLookupError),
        open(f"/proc/{process}/smaps_rollup") as file,
    ):
        return sum(1024 * int(line.split()[1]) for line in file if line.startswith("Pss:"))
    return 0


def _folder_bytes(folder: str) -> int:
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(path, name)).st_blocks * 512
    return total


def _end_children() -> None:
    """Kill every descendant of this process, and wait until all have ended."""
    while True:
        for process in _descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)
