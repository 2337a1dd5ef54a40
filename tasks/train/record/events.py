"""Records the events of a training with their times, one line of JSON each, in logs/events.jsonl.

Events are starting, lost and returning ranks, worker groups, splits, epochs, checkpoints and
notices. The file is on the training machine until it is uploaded to the run folder.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainwright.tasks import progress
from trainwright.tasks.storage.objects import ObjectStore

KEY = "logs/events.jsonl"
_TIME = len('{"at": "2026-01-01T00:00:00.000000+00:00"')
"""The length of the beginning of each line, its time."""
_KINDS = frozenset({"ranks", "rank", "world", "split", "epoch", "checkpoint", "back", "notice"})


@dataclass(frozen=True)
class EventRecorder:
    """A progress listener that appends events to the work folder's file."""

    work: Path

    def __call__(self, event: dict[str, Any]) -> None:
        """Append an event, if its kind is recorded."""
        if event["event"] in _KINDS:
            path = self.work / KEY
            path.parent.mkdir(parents=True, exist_ok=True)
            at = datetime.now(UTC).isoformat(timespec="microseconds")
            with path.open("a") as file:
                file.write(json.dumps({"at": at, **event}, default=str) + "\n")


@contextlib.contextmanager
def recording(work: Path) -> Iterator[None]:
    """Record events in the work folder's file during the block; nested blocks record once."""
    recorder = EventRecorder(work)
    if progress.has_listener(recorder):
        yield
        return
    with progress.listening(recorder):
        yield


def fetch(store: ObjectStore, work: Path) -> None:
    """Merge the stored file, which another machine may have written, into this one, by time."""
    path = work / KEY
    try:
        stored = store.get(KEY).splitlines()
    except FileNotFoundError:
        return
    lines = dict.fromkeys([*stored, *(path.read_bytes().splitlines() if path.exists() else [])])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        b"".join(line + b"\n" for line in sorted(lines, key=lambda line: line[:_TIME]))
    )


def parse(data: bytes) -> list[dict[str, Any]]:
    """The events of a file, without incomplete lines."""
    found = []
    for line in data.decode(errors="replace").splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            found.append(event)
    return found
