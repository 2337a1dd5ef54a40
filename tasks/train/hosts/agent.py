"""Runs on each remote host for one launch: starts ranks, relays their output, and cleans up.

The launcher (`hosts`) starts one agent per host, by the engine of the pool (ssh, Slurm or
Kubernetes). They exchange JSON, one object a line.

| from the launcher | |
|---|---|
| reach address port | can the host connect there, and over which interface? |
| put path data | append bytes (base64) to a file in the work folder |
| sync | reply after all earlier messages are handled |
| share name cores | create a CPU share for a process that will start |
| hold name | limit the started process to its share |
| start name command environment | start a process of that name, with a channel (`channel`) |
| say name text | forward the answer to a process's question |
| signal name number, kill name | |
| beat | heartbeat of the launcher |

The agent sends `reply` (to reach, sync, share) or `failed`; `said`, `log` and `ended` for each
process; `file` with bytes appended to TensorBoard event files; `ending` if it gets SIGTERM, by
which a cluster takes the host back; and its heartbeat `beat`, also every `BEAT_S`. When the
connection ends, or the launcher is silent for `SILENCE_S`, the agent ends every process and removes
the work folder.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import queue
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO

from trainwright.estimator.interfaces import interface_of
from trainwright.infra.cpu_share import CpuShare, remove_stale_cgroups
from trainwright.infra.lock import locked
from trainwright.infra.memory_limit import kernel_oom_kills
from trainwright.infra.private_files import keep_private
from trainwright.infra.process import dying_with_parent
from trainwright.tasks.settings import Settings
from trainwright.tasks.train.awake import Awake
from trainwright.tasks.train.channel import VARIABLE

BEAT_S = 5.0
SILENCE_S = 60.0
_LOOK_S = 1.0
_REACH_TIMEOUT_S = 10.0
_LOCK = ".lock"
_HERE = os.uname().nodename.replace(".", "-")
Message = dict[str, Any]


class HostAgent:
    """One launch on this host.

    The thread that calls `run` starts all processes; the kernel ends them with that thread.
    """

    def __init__(self, source: BinaryIO, sink: BinaryIO) -> None:
        self._source, self._sink, self._writing = source, sink, threading.Lock()
        folder = Settings.from_environment().home / "nodes"
        folder.mkdir(parents=True, exist_ok=True)
        _remove_stale(folder)
        # machines may share a home folder, so the name has the machine in it
        self.work = folder / f"{_HERE}.{os.urandom(8).hex()}"
        self._held = contextlib.ExitStack()
        with contextlib.suppress(OSError):  # on a file system without locks none is ever stale
            self._held.enter_context(locked(_lock_of(self.work), wait=False))
        self.work.mkdir(mode=0o700)
        self._children: dict[str, _Child] = {}
        self._shares: dict[str, CpuShare] = {}
        self._last_message_at = time.monotonic()
        self._sent_bytes: dict[Path, int] = {}
        self._sending_events = threading.Lock()
        self._ending = threading.Event()

    def run(self) -> None:
        """Handle messages until the connection to the launcher ends."""
        remove_stale_cgroups()
        signal.signal(signal.SIGTERM, lambda *_: self._ending.set())
        self.send("ready", work=str(self.work), python=sys.executable)
        threading.Thread(target=self._watch, name="watch", daemon=True).start()
        try:
            for line in self._source:
                self._last_message_at = time.monotonic()
                message = json.loads(line)
                try:
                    self._do(**message)
                except OSError as error:
                    what = f"{message['do']} {message.get('path') or message.get('name', '')}"
                    self.send("failed", what=what, why=error.strerror or str(error))
        except OSError:
            pass  # the connection has ended
        finally:
            self.end()

    def end(self) -> None:
        """End all processes and remove all files of this launch."""
        for child in self._children.values():
            child.kill()
        for child in self._children.values():
            child.process.wait()
        for share in self._shares.values():
            share.let_go()
            share.remove()
        self._remove_work()

    def _remove_work(self) -> None:
        shutil.rmtree(self.work, ignore_errors=True)
        self._held.close()

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message. If the launcher is gone, `run` notices the end of the connection."""
        line = (json.dumps({"kind": kind, **fields}) + "\n").encode()
        with self._writing, contextlib.suppress(OSError, ValueError):
            self._sink.write(line)
            self._sink.flush()

    def _do(self, do: str, **fields: Any) -> None:
        if do == "put":
            path = self.work / fields["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                file.write(base64.b64decode(fields["data"]))
        elif do == "reach":
            self.send("reply", **reach(fields["address"], fields["port"]))
        elif do == "sync":
            self.send("reply")
        elif do == "share":
            share = self._shares[fields["name"]] = CpuShare(fields["name"], fields["cores"])
            self.send("reply", how=share.how, group=str(share.group) if share.group else None)
        elif do == "hold":
            self._shares[fields["name"]].hold(self._children[fields["name"]].process.pid)
        elif do == "start":
            name = fields["name"]
            self._children[name] = _Child(self, name, fields["command"], fields["environment"])
        elif do == "say":
            self._children[fields["name"]].say(fields["text"].encode())
        elif do == "signal":
            self._children[fields["name"]].process.send_signal(fields["number"])
        elif do == "kill":
            self._children[fields["name"]].kill()

    def let_go(self, name: str) -> None:
        """Release the CPU share of a process that is about to be reaped."""
        if name in self._shares:
            self._shares[name].let_go()

    def _watch(self) -> None:
        """Send heartbeats and appended events; end everything after a silence of the launcher."""
        beat_at, told, awake = -BEAT_S, False, Awake()
        while time.monotonic() - max(self._last_message_at, awake.since()) < SILENCE_S:
            if time.monotonic() - beat_at >= BEAT_S:
                beat_at = time.monotonic()
                self.send("beat")
            if self._ending.is_set() and not told:
                told = True
                self.send("ending")
            time.sleep(_LOOK_S)
            self.send_events()
        for child in list(self._children.values()):
            child.kill()
        self._remove_work()
        os._exit(1)  # the main thread is blocked in reading a line that will not come

    def send_events(self) -> None:
        """Send what was appended to the event files since the last call."""
        # the work folder disappears when the launch ends
        with self._sending_events, contextlib.suppress(FileNotFoundError):
            for path in sorted(self.work.glob("events/*")):
                with path.open("rb") as file:
                    file.seek(self._sent_bytes.get(path, 0))
                    while data := file.read(1 << 18):
                        self.send("file", path=path.name, data=base64.b64encode(data).decode())
                    self._sent_bytes[path] = file.tell()


class _Child:
    """A process with its channel. A thread relays its messages and its log, then its end."""

    def __init__(
        self, agent: HostAgent, name: str, command: list[str], environment: dict[str, str]
    ) -> None:
        self._agent, self._name = agent, name
        self._socket, other = socket.socketpair()
        self._to_send, self._kills_before = queue.SimpleQueue[bytes | None](), kernel_oom_kills()
        with other:
            self.process = subprocess.Popen(
                dying_with_parent(command),
                cwd=agent.work,
                env={**os.environ, **environment, VARIABLE: str(other.fileno())},
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        threading.Thread(target=self._relay, name=f"relay-{name}", daemon=True).start()
        threading.Thread(target=self._send_queued, name=f"send-{name}", daemon=True).start()

    def say(self, text: bytes) -> None:
        """Queue a message for the process: one that is stopped must not block the others."""
        self._to_send.put(text)

    def _send_queued(self) -> None:
        with contextlib.suppress(OSError):  # the process has ended: `_relay` reports that
            while (text := self._to_send.get()) is not None:
                self._socket.sendall(text)

    def kill(self) -> None:
        """End the process and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _relay(self) -> None:
        log = self.process.stdout
        assert log is not None
        partial = {"said": b"", "log": b""}
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ, "said")
            selector.register(log, selectors.EVENT_READ, "log")
            while selector.get_map():
                for key, _ in selector.select():
                    kind = key.data
                    data = _read(key.fd)
                    if not data:
                        selector.unregister(key.fileobj)
                        data = b"\n" if partial[kind] else b""
                    *lines, partial[kind] = (partial[kind] + data).split(b"\n")
                    for line in lines:
                        self._agent.send(kind, name=self._name, text=line.decode(errors="replace"))
        log.close()
        self._to_send.put(None)
        self._socket.close()
        self._agent.let_go(self._name)
        code = self.process.wait()
        self._agent.send_events()
        kills = kernel_oom_kills() - self._kills_before
        self._agent.send("ended", name=self._name, code=code, oom_kills=kills)


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except ConnectionResetError:
        return b""


def reach(address: str, port: int) -> Message:
    """Connect to a listening address: the local interface and address used, or the error."""
    try:
        with socket.create_connection((address, port), timeout=_REACH_TIMEOUT_S) as connection:
            own = connection.getsockname()[0]
    except OSError as error:
        return {"error": error.strerror or str(error)}
    return {"interface": interface_of(own), "address": own}


def _remove_stale(folder: Path) -> None:
    """Remove the work folders of agents that were killed, also in containers that share them.

    A process's number says nothing there: an agent's lock does.
    """
    for name in {one.name.removesuffix(_LOCK) for one in folder.iterdir()}:
        if name.partition(".")[0] == _HERE:
            work = folder / name
            with contextlib.suppress(OSError), locked(_lock_of(work), wait=False):
                shutil.rmtree(work, ignore_errors=True)


def _lock_of(work: Path) -> Path:
    """The lock that an agent holds as long as it uses the work folder."""
    return work.with_name(work.name + _LOCK)


def main() -> None:
    """Serve the launcher over standard input and output."""
    keep_private()
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # other output must not appear between the messages
    HostAgent(source, sink).run()
