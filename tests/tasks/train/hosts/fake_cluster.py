"""A fake of a Kubernetes API server: Jobs, Secrets and pods, with processes as containers."""

from __future__ import annotations

import base64
import contextlib
import json
import ssl
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

from trainwright.tasks.train.hosts.kubernetes.manifests import SECRET_FOLDER

ApiObject = dict[str, Any]
_LAUNCHER = Path(__file__).parents[4] / "infra" / "stack" / "launcher" / "launcher.yaml"
_ALLOWED = {
    kind: rule["verbs"]
    for document in yaml.safe_load_all(_LAUNCHER.read_text())
    for rule in document.get("rules", ())
    for kind in rule["resources"]
}
"""What the role of a launcher in the stack's examples permits, which is all that the fake does."""
_GRACE_S, _REPORTS_AFTER_S = 20.0, 0.5


class FakeCluster:
    """`place` gives the words that run a container's words, by the name of the pool's host.

    With `schedules` off, pods stay pending until `schedule`. `answers` replaces answers by
    (method, kind).
    """

    def __init__(self, folder: Path, place: Callable[[str, Sequence[str]], list[str]]) -> None:
        self._folder, self._place, self._changing = folder, place, threading.RLock()
        self.jobs: dict[str, ApiObject] = {}
        self.created: list[ApiObject] = []
        self.pods: dict[str, ApiObject] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._short_of_memory: set[str] = set()
        self._ended_at: dict[str, float] = {}
        self.schedules = True
        self._pending: dict[str, ApiObject] = {}
        self.answers: dict[tuple[str, str], tuple[int, ApiObject]] = {}
        self.url = ""
        self.logins = set[str]()
        """the headers `Authorization` that requests had"""

    def ask(self, method: str, path: str, body: ApiObject | None) -> tuple[int, ApiObject]:
        """Answer a request."""
        path, _, query = path.partition("?")
        _, _, rest = path.partition("/namespaces/lab/")
        kind, _, name = rest.partition("/")
        verb = {"POST": "create", "DELETE": "delete"}.get(method, "get" if name else "list")
        if verb not in _ALLOWED.get(kind, ()):
            return 403, {"message": f"{kind} is forbidden: cannot {verb}"}
        with self._changing:
            if (method, kind) in self.answers:
                return self.answers[method, kind]
            if method == "POST" and body is not None:
                kubernetes_validate.validate(body, "1.32", strict=True)
                body["metadata"]["uid"] = str(uuid.uuid4())
                self.created.append(body)
                name = body["metadata"]["name"]
                if kind == "jobs":
                    self.jobs[name] = body
                    self.pods[name] = {"metadata": {"name": f"{name}-x"}, "status": {}}
                elif self.schedules:
                    self._start(name, body)
                else:
                    self._pending[name] = body
                return 201, body
            if method == "GET" and kind == "pods" and not name:
                job = query.partition("job-name%3D")[2]
                return 200, {"items": [self._pod(job)] if job in self.pods else []}
            if method == "DELETE" and self.jobs.pop(name, None) is not None:
                self.evict(name)
                self._pending.pop(name, None)
                del self.pods[name]
                return 200, {}
        return 404, {"message": f'{kind} "{name}" not found'}

    def _start(self, name: str, secret: ApiObject) -> None:
        folder = self._folder / name
        folder.mkdir(mode=0o700, parents=True)
        for file, data in secret["data"].items():
            (folder / file).write_bytes(base64.b64decode(data))
        (container,) = self.jobs[name]["spec"]["template"]["spec"]["containers"]
        words = [str(folder) if word == SECRET_FOLDER else word for word in container["command"]]
        given = [f"{one['name']}={one['value']}" for one in container.get("env", ())]
        host = self.jobs[name]["metadata"]["labels"]["trainwright/host"]
        with (self._folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                self._place(host, ["env", *given, *words]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _pod(self, name: str) -> ApiObject:
        pod, process = self.pods[name], self.processes.get(name)
        if "phase" not in pod["status"] and process is not None:
            ended = process.poll() is not None and self._reported(name)
            said = (self._folder / f"{name}.log").read_text()
            reason = "OOMKilled" if name in self._short_of_memory else "Error"
            state = {
                "terminated": {"reason": reason, "message": said, "exitCode": process.returncode}
            }
            phase = "Running" if not ended else "Failed" if process.returncode else "Succeeded"
            containers = [{"state": state}] if ended else []
            return {**pod, "status": {"phase": phase, "containerStatuses": containers}}
        return pod

    def _reported(self, name: str) -> bool:
        """Whether a pod's node has reported its end, which takes it some time."""
        ended_at = self._ended_at.setdefault(name, time.monotonic())
        return time.monotonic() - ended_at >= _REPORTS_AFTER_S

    def evict(self, name: str) -> None:
        """End a pod's process, as a kubelet does: a signal first."""
        if (process := self.processes.get(name)) is not None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
            process.kill()
            process.wait()

    def schedule(self) -> None:
        """Start the pods that are pending, and those that come."""
        with self._changing:
            self.schedules = True
            for name, secret in self._pending.items():
                self._start(name, secret)
            self._pending.clear()

    def exceed_memory(self, name: str) -> None:
        """End a pod's processes at once, as its node's kernel does if they exceed its limit."""
        self._short_of_memory.add(name)
        self.processes[name].kill()


@contextlib.contextmanager
def running(
    folder: Path,
    place: Callable[[str, Sequence[str]], list[str]] = lambda _, words: [*words],
    certificate: Path | None = None,
) -> Iterator[FakeCluster]:
    """The fake, with its server on this machine; with a certificate, by https."""
    cluster = FakeCluster(folder, place)

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            cluster.logins.add(self.headers.get("Authorization", ""))
            code, found = cluster.ask(self.command, self.path, json.loads(body) if body else None)
            self.send_response(code)
            self.end_headers()
            self.wfile.write(json.dumps(found).encode())

        do_GET = do_POST = do_DELETE = _answer

        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    scheme = "http" if certificate is None else "https"
    cluster.url = f"{scheme}://127.0.0.1:{server.server_port}"
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    try:
        yield cluster
    finally:
        for name in list(cluster.processes):
            cluster.evict(name)
        server.shutdown()
        server.server_close()
        serving.join()
