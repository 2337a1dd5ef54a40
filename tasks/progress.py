"""Progress of steps: one JSON object a line, for whoever watches (`TRAINWRIGHT_PROGRESS` names the file), and the log."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

from trainwright.tasks.settings import settings

_log = logging.getLogger("trainwright")
_listeners: list[Callable[[dict[str, Any]], None]] = []


def listen(listener: Callable[[dict[str, Any]], None]) -> None:
    """Call this for every event of this process."""
    _listeners.append(listener)


@contextlib.contextmanager
def heard_by(listener: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """The same, while the block runs."""
    listen(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def emit(event: str, **fields: Any) -> None:
    """Say that something happened: `emit("epoch", epoch=3, loss=0.21)`. Fields are JSON values."""
    path = settings().progress
    for listener in _listeners:
        listener({"event": event, **fields})
    if path is None:
        _log.info("%s %s", event, " ".join(f"{name}={value}" for name, value in fields.items()))
        return
    line = json.dumps({"event": event, **fields}, default=str) + "\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, line.encode())  # one write: lines of several processes do not mix
    finally:
        os.close(descriptor)
