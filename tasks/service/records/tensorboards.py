"""The TensorBoard of a run: a process on this machine, reached through the service.

Its path contains a secret that only logged-in users get. It answers only under that path, so no
other user of this machine gets in either. Its page fetches its data, so it needs the service's
origin: its scripts are trusted as much as the service's own page, and do not run in a sandbox as a
report's do.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import importlib.util
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from trainwright.infra.process import dying_with_parent
from trainwright.infra.sandbox.client import scrubbed_environment
from trainwright.tasks.errors import BadInput, ServiceUnreachable, TrainwrightError, Unauthorized
from trainwright.tasks.runs.run import Run
from trainwright.tasks.service.records.run_records import NotFound

MOST = 2
_BEGIN = """
import sys
sys.argv = ["tensorboard", *sys.stdin.read().splitlines()]
from tensorboard.main import run_main
run_main()
"""
"""Its options are its input, because every user of the machine may read a process's arguments."""
_START_S = 60.0
_ANSWER_S = 60.0
_ADDRESS = re.compile(rb"at http://127\.0\.0\.1:(\d+)/")
_PASSED = (
    "content-type",
    "content-encoding",
    "content-security-policy",
    "cache-control",
    "location",
    "expires",
)


@dataclass
class TensorBoard:
    """A running TensorBoard."""

    secret: str
    port: int
    process: subprocess.Popen[bytes]
    copy: Path | None

    def end(self) -> None:
        """End the process, and remove the files downloaded for it."""
        self.process.kill()
        self.process.wait()
        if self.copy is not None:
            shutil.rmtree(self.copy, ignore_errors=True)


@dataclass(frozen=True)
class Answer:
    """The answer of a TensorBoard."""

    status: int
    content: bytes
    headers: dict[str, str]


class TensorBoards:
    """The running TensorBoards, at most `MOST`. One more ends the least recently used."""

    def __init__(self) -> None:
        self._tensorboards: dict[str, TensorBoard] = {}
        self._starting = asyncio.Lock()
        self._opening = set[asyncio.Task[str]]()
        self._closed = False

    def close(self) -> None:
        """End all of them."""
        self._closed = True
        while self._tensorboards:
            self._tensorboards.popitem()[1].end()

    async def open(self, run: Run) -> str:
        """The secret of the run's TensorBoard; starts it if necessary.

        The start continues if this caller leaves. Raises NotFound, BadInput.
        """
        task = asyncio.create_task(self._open(run))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)
        return await asyncio.shield(task)

    async def _open(self, run: Run) -> str:
        async with self._starting:
            tensorboard = self._tensorboards.pop(run.uri, None)
            if tensorboard is not None and tensorboard.process.poll() is not None:
                tensorboard.end()
                tensorboard = None
            if tensorboard is None:
                while len(self._tensorboards) >= MOST:
                    self._tensorboards.pop(next(iter(self._tensorboards))).end()
                tensorboard = await asyncio.to_thread(_start, run)
                if self._closed:
                    tensorboard.end()
                    raise ServiceUnreachable(
                        "tensorboard: the service is shutting down", service="tensorboard"
                    )
            self._tensorboards[run.uri] = tensorboard  # the most recently used one last
            return tensorboard.secret

    async def ask(
        self, secret: str, path: str, method: str, content_type: str | None, body: bytes
    ) -> Answer:
        """The answer of the TensorBoard with this secret. Raises Unauthorized if none has it."""
        for tensorboard in self._tensorboards.values():
            if hmac.compare_digest(
                tensorboard.secret.encode(), secret.encode("utf-8", "surrogateescape")
            ):
                return await asyncio.to_thread(_ask, tensorboard, path, method, content_type, body)
        raise Unauthorized("tensorboard: not running; open it from the run's page")


def _start(run: Run) -> TensorBoard:
    if importlib.util.find_spec("tensorboard") is None:
        raise BadInput(
            "tensorboard: not installed on the service's machine; install trainwright[train]"
        )
    folder, copy = run.work_path / "events", None
    if not folder.is_dir() or not any(folder.iterdir()):
        keys = [item.key for item in run.objects.list("events/")]
        if not keys:
            raise NotFound(f"tensorboard: {run.job_name}/{run.id} has recorded no events yet")
        folder = copy = Path(tempfile.mkdtemp(prefix="trainwright-tensorboard-"))
        for key in keys:
            run.objects.get_file(key, copy / Path(key).name)
    secret = secrets.token_urlsafe(32)
    options = {
        "logdir": folder,
        "host": "127.0.0.1",
        "port": 0,
        "path_prefix": f"/{secret}",
        "load_fast": "false",
        "reload_interval": 5,
    }
    with tempfile.TemporaryFile() as log, tempfile.TemporaryFile() as given:
        given.write("\n".join(f"--{name}={value}" for name, value in options.items()).encode())
        given.seek(0)
        process = subprocess.Popen(
            dying_with_parent([sys.executable, "-P", "-c", _BEGIN]),
            env=scrubbed_environment(),
            stdin=given,
            stdout=subprocess.DEVNULL,
            stderr=log,
            cwd="/",
        )
        tensorboard = TensorBoard(secret, 0, process, copy)
        for _ in range(int(_START_S / 0.1)):
            log.seek(0)
            said = log.read()
            if found := _ADDRESS.search(said):
                tensorboard.port = int(found[1])
                return tensorboard
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
                break
    tensorboard.end()
    last = said.decode(errors="replace").strip().rpartition("\n")[2][:200]
    raise TrainwrightError(f"tensorboard: did not start ({last})")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object, **__: object) -> None:
        return None


_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)


def _ask(
    tensorboard: TensorBoard, path: str, method: str, content_type: str | None, body: bytes
) -> Answer:
    headers = {"Content-Type": content_type} if content_type else {}
    request = urllib.request.Request(
        f"http://127.0.0.1:{tensorboard.port}/{tensorboard.secret}/{path}",
        body if method == "POST" else None,
        headers,
        method=method,
    )
    try:
        with _opener.open(request, timeout=_ANSWER_S) as answer:
            return Answer(answer.status, answer.read(), _kept(answer.headers.items()))
    except urllib.error.HTTPError as error:
        return Answer(error.code, error.read(), _kept(error.headers.items()))
    except (OSError, ValueError) as error:
        raise ServiceUnreachable(
            f"tensorboard: does not answer ({error}); open it from the run's page again",
            service="tensorboard",
            address="127.0.0.1",
        ) from None


def _kept(headers: list[tuple[str, str]]) -> dict[str, str]:
    return {name: value for name, value in headers if name.lower() in _PASSED}
