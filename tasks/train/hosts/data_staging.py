"""Stages a training's data on a host: the launcher's side of `stage_data`. Loads no torch."""

from __future__ import annotations

import json
import queue
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from trainwright.tasks import progress
from trainwright.tasks.data.sources import content_sha256, files_of, localized, require_content
from trainwright.tasks.errors import BadInput, TrainingFailed, from_document
from trainwright.tasks.settings import Settings
from trainwright.tasks.spec.data_spec import DataSpec
from trainwright.tasks.spec.pool import LOCAL_ADDRESSES
from trainwright.tasks.train.hosts.session import Session
from trainwright.tasks.train.request import Order

_DATA = "data"
Message = dict[str, Any]


class DataStaging:
    """Stages the data on one host before its ranks start.

    Uses the host's own copy, lets the host download from S3, or copies the data of this machine.
    """

    def __init__(self, session: Session, order: Order) -> None:
        self._session, self._messages = session, queue.SimpleQueue[Message]()
        self._spec, self._sha256 = order.request.job.data, order.request.schema_.sha256
        self._settings = order.request.settings
        self._log: list[str] = []

    def run(self) -> str:
        """The data's path on the host.

        Raises BadInput with the host and the URI, or ServiceUnreachable if S3 is unreachable.
        """
        fetched = self._spec.uri.startswith("s3://") and not _embedded(self._settings)
        spec = self._spec if fetched else localized(self._spec, self._settings)
        found = self._look(spec, None)
        if found["kind"] == "missing" and not (fetched or spec.uri.startswith("builtin:")):
            found = self._look(spec, self._copy(spec))
        if found["kind"] == "missing":
            error = from_document(found["error"])
            raise type(error)(
                f"{self._session}: {self._spec.uri} is missing on that host: {error}",
                **error.details,
            )
        return str(found["uri"])

    def _copy(self, spec: DataSpec) -> str:
        """Copy this machine's files to the host. Returns the path of the copy there."""
        root, files = Path(spec.uri), files_of(spec)
        require_content(self._spec, content_sha256(spec), self._sha256)
        below = root if root.is_dir() else root.parent
        done, total = 0, sum(path.stat().st_size for path in files)

        def went(count: int) -> None:
            nonlocal done
            done += count
            self._report(done, total)

        for path in dict.fromkeys(files):
            self._session.put(
                f"{_DATA}/copy/{self._below(root)}{path.relative_to(below).as_posix()}", path, went
            )
        try:
            self._session.sync()
        except TrainingFailed as error:
            raise BadInput(
                f"{self._spec.uri} is missing on that host and can't be copied: {error}"
            ) from None
        return f"{self._session.work}/{_DATA}/copy/{root.name}"

    @staticmethod
    def _below(root: Path) -> str:
        return f"{root.name}/" if root.is_dir() else ""

    def _report(self, done: int, total: int) -> None:
        progress.emit("preload", host=self._session.name, uri=self._spec.uri, bytes=done, of=total)

    def _look(self, spec: DataSpec, copied: str | None) -> Message:
        asked = {"spec": spec.model_dump(mode="json"), "sha256": self._sha256, "copied": copied}
        name = f"{_DATA}{'-copied' if copied else ''}"
        self._session.put(f"{name}.json", json.dumps(asked).encode())
        command = [
            self._session.python,
            "-P",
            "-m",
            "trainwright.tasks.train.hosts.stage_data",
            f"{self._session.work}/{name}.json",
        ]
        self._session.start(
            name,
            command,
            self._settings.s3_variables() if spec.uri.startswith("s3://") else {},
            self,
        )
        found: Message | None = None
        while (message := self._messages.get())["kind"] != "ended":
            if message["kind"] == "fetched":
                self._report(message["bytes"], message["of"])
            elif message["kind"] in ("found", "missing"):
                found = message
        why = message["lost"] or (self._log or ["it exited without reporting an error"])[-1]
        return found or {"kind": "missing", "error": TrainingFailed(why).document()}

    def said(self, line: str) -> None:
        """Queue a message from the host."""
        self._messages.put(json.loads(line))

    def logged(self, line: str) -> None:
        """Keep the last lines, which explain an exit without a message."""
        self._log = [*self._log[-9:], line]

    def ended(self, code: int, lost: str | None, oom_kills: int = 0) -> None:
        """Queue the end, after all other messages."""
        self._messages.put({"kind": "ended", "lost": lost})


def _embedded(settings: Settings) -> bool:
    """Whether only this machine can reach the S3 server."""
    endpoint = settings.s3_endpoint
    return endpoint is None or urlsplit(endpoint).hostname in LOCAL_ADDRESSES
