"""Models whose code attacks the machine, for tests of the sandbox on the command line and in the
service.

The model of `probing` tries everything that should be refused, and raises an error that names what
succeeded. `ATTACKS` hit a limit or end themselves; each has a pattern of the resulting line.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SECRET = "the-secret-of-the-caller"

HEAD = """
import os, pathlib, signal, socket, subprocess, sys, time
import torch
from torch import nn
def example_batch(n): return torch.rand(n, 4), torch.zeros(n).long()
"""

_PROBES = (
    HEAD
    + """
import ctypes, glob
PORT, OUTSIDE, SECRET = {port}, {outside!r}, {secret!r}

def tcp(): socket.create_connection(("127.0.0.1", PORT), 2)
def udp(): socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", PORT))
def name_service(): socket.getaddrinfo("example.com", 80)
def unix_socket(): socket.socket(socket.AF_UNIX).connect(OUTSIDE + "/socket")
def abstract_socket(): socket.socket(socket.AF_UNIX).connect("\\0trainwright-test-" + str(PORT))
def write_outside(): open(OUTSIDE + "/written", "w")
def change_outside(): os.chmod(OUTSIDE + "/credentials", 0o777)
def write_source(): open(__file__, "a")
def write_libraries(): open(torch.__file__, "r+")
def write_kernel(): os.open("/proc/sys/kernel/core_pattern", os.O_WRONLY)
def read_shadow(): open("/etc/shadow").read()
def read_credentials(): open(OUTSIDE + "/credentials").read()
def list_outside(): os.listdir(OUTSIDE)
def read_environments():
    for path in glob.glob("/proc/[0-9]*/environ") + ["/proc/self/environ"]:
        try:
            found = SECRET.encode() in open(path, "rb").read()
        except OSError:
            continue
        if found: return
    raise OSError
def read_own_environment():
    if SECRET not in str(os.environ): raise OSError
def kill_parent():
    parent = os.getppid()
    os.kill(parent, signal.SIGKILL)
    time.sleep(0.2)
    if os.getppid() == parent: raise OSError
def take_files_of_first_process():
    for number in range(3, 30):
        try:
            return os.open(f"/proc/1/fd/{{number}}", os.O_WRONLY)
        except OSError:
            continue
    raise OSError
def gain_rights():
    if ctypes.CDLL(None).unshare(0x10000000) != 0: raise OSError

def build_model():
    succeeded = []
    for probe in ({names}):
        try:
            probe()
        except OSError:
            continue
        succeeded.append(probe.__name__)
    raise RuntimeError("succeeded: " + " ".join(succeeded or ["nothing"]))
"""
)
_NAMES = (
    "tcp, udp, name_service, unix_socket, abstract_socket, write_outside, change_outside, "
    "write_source, write_libraries, write_kernel, read_shadow, read_credentials, list_outside, "
    "read_environments, read_own_environment, kill_parent, take_files_of_first_process, gain_rights"
)


@contextlib.contextmanager
def probing(outside: Path) -> Iterator[str]:
    """The code of a model that probes servers here and files in a folder outside its sandbox."""
    credentials = outside / "credentials"
    credentials.write_text(SECRET)
    credentials.chmod(0o600)
    with contextlib.ExitStack() as stack:
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = tcp.getsockname()[1]
        udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        udp.bind(("127.0.0.1", port))
        servers = [tcp, udp]
        for address in (str(outside / "socket"), f"\0trainwright-test-{port}"):
            servers.append(stack.enter_context(socket.socket(socket.AF_UNIX)))
            servers[-1].bind(address)
            servers[-1].listen()
        yield _PROBES.format(port=port, outside=str(outside), secret=SECRET, names=_NAMES)
        for server in servers:
            server.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                server.recv(1) if server is udp else server.accept()
                raise AssertionError(f"{server} was reached from the sandbox")
    assert sorted(path.name for path in outside.iterdir()) == ["credentials", "socket"]
    assert credentials.stat().st_mode & 0o777 == 0o600


@dataclass(frozen=True)
class Attack:
    """A model's code, and a pattern of the line that reports how it was contained."""

    code: str
    says: str
    timeout_s: float = 40.0


MEMORY_BYTES = 3 * 2**30
"""the limit that the tests set"""


LEFT_BEHIND = "91919.5"
"""the sleep time of the attacks' children, by which tests find them"""
_SLEEP = f'subprocess.Popen(["sleep", "{LEFT_BEHIND}"], start_new_session=True)'
ATTACKS = {
    "leaves a child": Attack(f"{_SLEEP}\nos._exit(3)", "with exit code 3"),
    "runs forever": Attack("while True: pass", "did not end within 5 s", 5.0),
    "waits for its child": Attack(f"{_SLEEP}.wait()", r"1 process\(es\) that it had started", 5.0),
    "forks without end": Attack(
        f"while True:\n    if os.fork() == 0:\n        {_SLEEP}\n        time.sleep(100)",
        "started more than the 64 processes allowed",
    ),
    "fills the memory": Attack(
        "x = [torch.empty(2**26) for _ in range(2**20)]", "allocate memory.*allowed: 3 GiB"
    ),
    "fills the memory by many": Attack(
        "for _ in range(12):\n    if os.fork() == 0: x = b'x' * 2**28; time.sleep(100)\n"
        "time.sleep(100)",
        "took too much memory; allowed: 3 GiB",
    ),
    "fills the disk": Attack(
        "for n in range(99):\n    with open(f'f{n}', 'wb') as f: f.write(bytes(2**24))\n"
        "time.sleep(100)",
        "No space left on device.*at most 256 MiB",
    ),
    "crashes": Attack("import ctypes; ctypes.string_at(0)", "crashed with signal 11"),
    "aborts": Attack("os.abort()", "crashed with signal 6"),
    "prints without end": Attack("while True: print('y' * 2**16)", "did not end within 5 s", 5.0),
    "prints much": Attack(
        "print('x' * 9_000_000); print('that was it', flush=True); os._exit(4)", "4: that was it"
    ),
    "exits with 0": Attack("os._exit(0)", "ended its process without an answer"),
    "answers itself": Attack(
        "for name in os.listdir('/proc/self/fd'):\n"
        "    if int(name) > 2:\n"
        "        try: os.write(int(name), b'{\"error\": 5}')\n"
        "        except OSError: pass\n"
        "os._exit(0)",
        "something other than a structure",
    ),
}
