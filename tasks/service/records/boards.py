"""TensorBoard of a run: a process of its own on this machine, reached through the service only.

Its address holds a secret that only those who are logged in are told, and that it keeps for as long as it runs; it answers
under that path alone, so that nobody else on this machine gets in either. Its page needs our origin (it fetches what it shows),
so what a run has recorded for it is trusted as the page itself is: unlike a report's, its scripts are in no sandbox.
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
from trainwright.tasks.errors import BadInput, ServiceUnreachable, TrainwrightError, Unauthorized
from trainwright.tasks.runs.run import Run
from trainwright.tasks.service.records.run_records import NotFound

MOST = 2
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
class Board:
    """A TensorBoard that runs."""

    secret: str
    port: int
    process: subprocess.Popen[bytes]
    copy: Path | None

    def end(self) -> None:
        """End it, and remove what was fetched for it."""
        self.process.kill()
        self.process.wait()
        if self.copy is not None:
            shutil.rmtree(self.copy, ignore_errors=True)


@dataclass(frozen=True)
class Answer:
    """What a TensorBoard answers."""

    status: int
    content: bytes
    headers: dict[str, str]


class Boards:
    """The TensorBoards that run: a few, the longest unused of them ended for another."""

    def __init__(self) -> None:
        self._boards: dict[str, Board] = {}
        self._starting = asyncio.Lock()
        self._opening = set[asyncio.Task[str]]()
        self._closed = False

    def close(self) -> None:
        """End them."""
        self._closed = True
        while self._boards:
            self._boards.popitem()[1].end()

    async def open(self, run: Run) -> str:
        """The secret of the run's TensorBoard, which is started where it does not run. Raises NotFound, BadInput.

        What was begun is finished, and kept for the next who asks, where who asked has left meanwhile.
        """
        task = asyncio.create_task(self._open(run))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)
        return await asyncio.shield(task)

    async def _open(self, run: Run) -> str:
        async with self._starting:
            board = self._boards.pop(run.uri, None)
            if board is not None and board.process.poll() is not None:
                board.end()
                board = None
            if board is None:
                while len(self._boards) >= MOST:
                    self._boards.pop(next(iter(self._boards))).end()
                board = await asyncio.to_thread(_start, run)
                if self._closed:
                    board.end()
                    raise ServiceUnreachable("tensorboard: the service ends", service="tensorboard")
            self._boards[run.uri] = board  # the newest used last
            return board.secret

    async def ask(
        self, secret: str, path: str, method: str, content_type: str | None, body: bytes
    ) -> Answer:
        """What the TensorBoard of this secret answers. Raises Unauthorized for another, ServiceUnreachable."""
        for board in self._boards.values():
            if hmac.compare_digest(
                board.secret.encode(), secret.encode("utf-8", "surrogateescape")
            ):
                return await asyncio.to_thread(_ask, board, path, method, content_type, body)
        raise Unauthorized(
            "tensorboard: it has ended, or was never started; open it from the run's screen"
        )


def _start(run: Run) -> Board:
    if importlib.util.find_spec("tensorboard") is None:
        raise BadInput("tensorboard: is missing where the service runs; install trainwright[train]")
    folder, copy = run.work_path / "events", None
    if not folder.is_dir() or not any(folder.iterdir()):
        keys = [item.key for item in run.objects.list("events/")]
        if not keys:
            raise NotFound(f"tensorboard: {run.job_name}/{run.id} has recorded nothing for it yet")
        folder = copy = Path(tempfile.mkdtemp(prefix="trainwright-tensorboard-"))
        for key in keys:
            run.objects.get_file(key, copy / Path(key).name)
    secret = secrets.token_urlsafe(32)
    command = [
        sys.executable,
        "-m",
        "tensorboard.main",
        "--logdir",
        str(folder),
        "--host",
        "127.0.0.1",
        "--port",
        "0",
        "--path_prefix",
        f"/{secret}",
        "--load_fast",
        "false",
        "--reload_interval",
        "5",
    ]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            dying_with_parent(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            cwd="/",
        )
        board = Board(secret, 0, process, copy)
        for _ in range(int(_START_S / 0.1)):
            log.seek(0)
            said = log.read()
            if found := _ADDRESS.search(said):
                board.port = int(found[1])
                return board
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
                break
    board.end()
    last = said.decode(errors="replace").strip().rpartition("\n")[2][:200]
    raise TrainwrightError(f"tensorboard: did not start ({last})")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object, **__: object) -> None:
        return None


_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)


def _ask(board: Board, path: str, method: str, content_type: str | None, body: bytes) -> Answer:
    headers = {"Content-Type": content_type} if content_type else {}
    request = urllib.request.Request(
        f"http://127.0.0.1:{board.port}/{board.secret}/{path}",
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
            f"tensorboard: does not answer ({error}); open it from the run's screen again",
            service="tensorboard",
            address="127.0.0.1",
        ) from None


def _kept(headers: list[tuple[str, str]]) -> dict[str, str]:
    return {name: value for name, value in headers if name.lower() in _PASSED}
