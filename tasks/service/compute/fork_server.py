"""A process that has imported what answers need, and forks one child for each request.

Run as `python -m trainwright.tasks.service.compute.fork_server KIND`. `trace` runs a model's code: in namespaces of its own for
users, network and processes, where the kernel permits them; `compute` does our own arithmetic. The child has limits of memory,
CPU and time, and ends with all it started when its client goes. Standard input is a Unix socket on which each request's own
socket is passed; the first thing said there is how children are kept off the network.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import resource
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from trainwright.infra.process import hide

_NEW_USER, _NEW_NETWORK, _NEW_PROCESSES = 0x10000000, 0x40000000, 0x20000000
_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36
_MAX_ANSWER_BYTES = 64 * 2**20
_MAX_PROCESSES = 256
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> int:
    """Warm up, then handle requests until the control socket closes."""
    kind = sys.argv[1]
    alone = (
        kind == "trace" and _libc.unshare(_NEW_USER | _NEW_NETWORK) == 0
    )  # before any thread exists
    if kind == "compute":
        hide()  # its environment leads to the store
    control = socket.socket(fileno=0)
    _warm_up(kind)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # handlers are reaped by the kernel
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # a terminal's goes to the server, which closes the control socket
    control.sendall(
        json.dumps({"network": "own namespace" if alone else "audit hook"}).encode() + b"\n"
    )
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 16, 1)
        if not message:
            return 0
        for descriptor in descriptors:
            if os.fork() == 0:
                control.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _handle(kind, alone, socket.socket(fileno=descriptor))
                os._exit(0)
            os.close(descriptor)


def _warm_up(kind: str) -> None:
    """Import what an answer will need: what a child that answers once has imported.

    The answer itself is the child's, because autograd's threads do not survive a fork.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        before = set(sys.modules)
        with contextlib.suppress(Exception), tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "trainwright_sample.py").write_text(_SAMPLE)
            _answer(kind, {"folder": folder, **_SAMPLE_REQUESTS[kind]})
        with os.fdopen(write, "w") as out:
            out.write("\n".join(sorted(set(sys.modules) - before)))
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as names:
        found = names.read().split("\n")
    os.waitpid(child, 0)
    for name in found:
        if not name.startswith("trainwright_sample"):
            with contextlib.suppress(
                Exception
            ):  # made at run time, or of a module that imports no more
                importlib.import_module(name)


def _handle(kind: str, alone: bool, connection: socket.socket) -> None:
    """One request: read, worked on in a child of ours, answered. Ends that child and all it started, whatever happens."""
    _libc.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    _libc.prctl(_SET_CHILD_SUBREAPER, 1)  # what leaves its parents comes to us
    request = json.loads(_read_all(connection))
    folder = Path(tempfile.mkdtemp(prefix="trainwright-service-"))
    try:
        for name, text in request.pop("files", {}).items():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "source" / name).write_text(text, errors="strict")
        request["folder"] = str(folder / "source")
        if alone:
            _libc.unshare(
                _NEW_PROCESSES
            )  # the child is its first process, and with it all others end
        child = os.fork()
        if child == 0:
            connection.close()
            _work(kind, alone, request, folder)
        limit_s = request["timeout_s"]
        ended = _wait(child, connection, limit_s)
        _end(child)
        if ended != "gone":
            with contextlib.suppress(OSError):
                connection.sendall(_result(folder, ended, _exit_code(child), limit_s))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _work(kind: str, alone: bool, request: dict[str, Any], folder: Path) -> None:
    _libc.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    os.setsid()
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for given, wanted in ((null, 0), (log, 1), (log, 2)):
        os.dup2(given, wanted)
    os.closerange(3, 1024)
    seconds = int(request["timeout_s"]) + 1
    _limit(resource.RLIMIT_CPU, seconds)
    _limit(resource.RLIMIT_FSIZE, _MAX_ANSWER_BYTES)
    _limit(resource.RLIMIT_CORE, 0)
    if alone:
        _limit(resource.RLIMIT_NPROC, _MAX_PROCESSES)
    if kind == "compute":
        _limit(
            resource.RLIMIT_AS, request["memory_limit_bytes"]
        )  # for a trace, its own code sets it
    elif not alone:
        sys.addaudithook(_refuse_sockets)
    code = 1
    try:
        os.chdir(folder)
        (folder / "answer").write_text(_answer(kind, request))
        code = 0
    except BaseException as error:  # noqa: BLE001 - the outermost boundary of a process: told in its log
        print(f"{type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
    finally:
        os._exit(code)


def _limit(what: int, value: int) -> None:
    with contextlib.suppress(ValueError, OSError):  # a lower limit holds already
        resource.setrlimit(what, (value, value))


def _refuse_sockets(event: str, _: tuple[Any, ...]) -> None:
    if event.startswith("socket.") or event in (
        "ctypes.dlopen",
        "subprocess.Popen",
        "os.exec",
        "os.posix_spawn",
    ):
        raise PermissionError(f"a model's code has no network here ({event})")


def _answer(kind: str, request: dict[str, Any]) -> str:
    if kind == "trace":
        from trainwright.estimator.trace import trace

        return trace.answer(request)
    from trainwright.tasks.service.compute import answers

    return answers.answer(request)


def _wait(child: int, connection: socket.socket, limit_s: float) -> str:
    """How it ended: `done`, `late`, or `gone`, where the client has."""
    watched = os.pidfd_open(child)
    poll = select.poll()
    poll.register(watched, select.POLLIN)
    poll.register(
        connection.fileno(), 0
    )  # a hang-up only: the request's end was the end of what it says
    ready = [number for number, _ in poll.poll(limit_s * 1000)]
    return "done" if watched in ready else "gone" if ready else "late"


def _end(child: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    while True:
        left = [
            int(one)
            for one in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            if int(one) != child
        ]
        for one in left:
            os.kill(one, signal.SIGKILL)
            os.waitpid(one, 0)
        state = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if not left and state is not None:
            return
        time.sleep(0.001)


def _exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _result(folder: Path, ended: str, code: int, limit_s: float) -> bytes:
    answer = folder / "answer"
    if ended == "done" and code == 0 and answer.is_file():
        with answer.open("rb") as file:
            return b"+" + file.read(_MAX_ANSWER_BYTES)
    log = folder / "log"
    words = (
        log.read_bytes()[-4096:].decode(errors="replace").strip().splitlines()
        if log.exists()
        else []
    )
    how = {
        "ended": ended,
        "code": code,
        "limit_s": limit_s,
        "last": words[-1][:300] if words else "",
    }
    return b"-" + json.dumps(how).encode()


def _read_all(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(2**20):
        parts.append(part)
    return b"".join(parts)


_SAMPLE = """
import torch
def build_model():
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(72, 2)
    )
def example_batch(size):
    return torch.rand(size, 1, 8, 8), torch.randint(0, 2, (size,))
def loss(outputs, targets):
    return torch.nn.functional.cross_entropy(outputs, targets)
"""
_SAMPLE_REQUESTS: dict[str, dict[str, Any]] = {
    "trace": {
        "entry": "trainwright_sample.py",
        "config": {},
        "batch_size": 2,
        "spec": None,
        "optimizer": {"name": "adamw"},
        "precision": "fp32",
        "accumulation": 1,
        "memory_limit_bytes": 0,
    },
    "compute": {"call": "warm_up", "memory_limit_bytes": 0},
}


if __name__ == "__main__":
    raise SystemExit(main())
