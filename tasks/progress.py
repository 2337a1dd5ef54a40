"""Progress of the work: events, as records of the logger `trainwright.progress`.

`emit` reports an event; whoever wants to see events adds a listener for a while. Without a listener an
event is an ordinary log line.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Listener = Callable[[Event], None]
_log = logging.getLogger("trainwright.progress")
_log.setLevel(logging.INFO)


class _Handler(logging.Handler):
    """Passes the events among the log records to a listener. An error of the listener is raised."""

    def __init__(self, listener: Listener) -> None:
        super().__init__()
        self.listener = listener

    def handle(self, record: logging.LogRecord) -> bool:
        self.listener(record.event)  # type: ignore[attr-defined]  # set by `emit`
        return True


def emit(event: str, **fields: Any) -> None:
    """Report that something happened: `emit("epoch", epoch=3, loss=0.21)`. Fields are JSON values."""
    words = " ".join(f"{name}={value}" for name, value in fields.items())
    _log.info("%s %s", event, words, extra={"event": {"event": event, **fields}})


def listen(listener: Listener) -> None:
    """From now on the listener gets every event of this process."""
    _log.addHandler(_Handler(listener))


def has_listener(listener: Listener) -> bool:
    """Whether an equal listener gets the events of this process."""
    handlers = (one for one in _log.handlers if isinstance(one, _Handler))
    return any(one.listener == listener for one in handlers)


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """While the block runs, the listener gets every event of this process."""
    handler = _Handler(listener)
    _log.addHandler(handler)
    try:
        yield
    finally:
        _log.removeHandler(handler)


def appended_to(path: Path) -> Listener:
    """A listener that appends events to a file, one JSON object a line, as long as the file exists.

    Who follows the work creates the file; several processes may append to it.
    """

    def append(event: Event) -> None:
        line = json.dumps(event, default=str) + "\n"
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
        except FileNotFoundError:
            return
        try:
            os.write(descriptor, line.encode())  # one write: lines of several processes do not mix
        finally:
            os.close(descriptor)

    return append
