"""A process that has imported a function's modules, and runs it in a sandbox per request.

`client` starts it as `python -P -m trainwright.infra.sandbox.fork_server TERMS`. Standard input is
a Unix socket. When ready, the server writes a line of JSON to it. Then it receives one socket per
request through it, and forks a supervisor for each. It ends when the socket closes.

`multiprocessing`'s fork server can't replace it: it inherits the environment of the process that
starts it, which sandboxed code could then read, and a process can have only one.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from trainwright.infra.process import allow_inspection
from trainwright.infra.sandbox import Protection, SandboxLimits
from trainwright.infra.sandbox.confine import strongest
from trainwright.infra.sandbox.supervise import run

Function = Callable[[dict[str, Any]], str | bytes]


def main() -> int:
    """Prepare, then serve until the control socket closes."""
    config = json.loads(sys.argv[1])
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started us
    protection: Protection = "none"
    if config["confined"]:
        protection = strongest()
    else:
        allow_inspection(False)  # its environment may contain secrets
    gc.disable()  # it takes a tenth of torch's import time, and frees nothing
    try:
        function = _imported(config["function"])
        if config["warm_up"] is not None:
            _import_what_it_uses(function, config["warm_up"])
    except Exception as error:  # noqa: BLE001 - reported to the process that started us
        control.sendall(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode() + b"\n")
        return 1
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps supervisors
    control.sendall(json.dumps({"protection": protection}).encode() + b"\n")
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            break
        if os.fork() == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _supervise(function, protection, socket.socket(fileno=descriptors[0]))
        os.close(descriptors[0])
    with contextlib.suppress(ChildProcessError):
        os.wait()  # until no supervisor is left: each ends with its request's socket
    return 0


def _imported(name: str) -> Function:
    module, _, function = name.partition(":")
    found: Function = getattr(importlib.import_module(module), function)
    return found


def _import_what_it_uses(function: Function, request: dict[str, Any]) -> None:
    """Import the modules that a child process imports while it answers a request.

    This process must not answer it itself, because autograd's threads do not survive a fork.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        known = set(sys.modules)
        try:
            function(request)
        finally:
            os.write(writer, "\n".join(set(sys.modules) - known).encode())
            os._exit(0)
    os.close(writer)
    with open(reader) as names:
        used = names.read().split()
    os.waitpid(child, 0)
    for name in sorted(used):
        with contextlib.suppress(ImportError):  # created at run time: there is no such module
            importlib.import_module(name)


def _supervise(function: Function, protection: Protection, connection: socket.socket) -> NoReturn:
    try:
        message = json.loads(b"".join(iter(lambda: connection.recv(2**20), b"")))
        request = message["request"]
        try:
            outcome = run(
                lambda: _encoded(function(request)),
                SandboxLimits(**message["limits"]),
                protection,
                readable=message["readable"],
                client=connection.fileno(),
            )
            connection.sendall(outcome.to_bytes())
        except OSError as error:
            connection.sendall(json.dumps({"error": str(error)}).encode())
    finally:
        os._exit(0)


def _encoded(answer: str | bytes) -> bytes:
    return answer if isinstance(answer, bytes) else answer.encode()


if __name__ == "__main__":
    raise SystemExit(main())
