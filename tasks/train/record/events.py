"""What happened while training, with its time: a line of JSON each in logs/events.jsonl, on the training machine until the
run folder has it. Ranks that start, are lost or come back, worlds, splits, epochs, checkpoints, notices.
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
"""what each line begins with"""
_KINDS = frozenset({"ranks", "rank", "world", "split", "epoch", "checkpoint", "back", "notice"})


@dataclass(frozen=True)
class EventRecorder:
    """A listener to progress that appends what happens to the work folder's file."""

    work: Path

    def __call__(self, event: dict[str, Any]) -> None:
        """Append an event, if it is of a kind that is kept."""
        if event["event"] in _KINDS:
            path = self.work / KEY
            path.parent.mkdir(parents=True, exist_ok=True)
            at = datetime.now(UTC).isoformat(timespec="microseconds")
            with path.open("a") as file:
                file.write(json.dumps({"at": at, **event}, default=str) + "\n")


@contextlib.contextmanager
def recording(work: Path) -> Iterator[None]:
    """While the block runs, events go to the work folder's file; once, also if blocks are nested."""
    recorder = EventRecorder(work)
    if progress.has_listener(recorder):
        yield
        return
    with progress.listening(recorder):
        yield


def fetch(store: ObjectStore, work: Path) -> None:
    """What other machines have recorded, so that the run's file goes on with it: all lines of both files, by time."""
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
    """The events of a file; a line that was cut short is left out."""
    found = []
    for line in data.decode(errors="replace").splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            found.append(event)
    return found
