"""Progress events: `emit` reports an event, and listeners receive it.

An event that has a line for people (`tasks.event_lines`) is also an ordinary log line.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trainwright.tasks.event_lines import line_of

Event = dict[str, Any]
Listener = Callable[[Event], None]
_log = logging.getLogger("trainwright.progress")
_log.setLevel(logging.INFO)
_log.propagate = False  # its handlers are the listeners
_lines = logging.getLogger("trainwright.run")
_lines.setLevel(logging.INFO)


class _Handler(logging.Handler):
    """Passes events to a listener, and raises the listener's errors."""

    def __init__(self, listener: Listener) -> None:
        super().__init__()
        self.listener = listener

    def handle(self, record: logging.LogRecord) -> bool:
        self.listener(record.event)  # type: ignore[attr-defined]  # set by `emit`
        return True


def emit(event: str, **fields: Any) -> None:
    """Report an event, as in `emit("epoch", epoch=3, loss=0.21)`. Fields are JSON values."""
    said = {"event": event, **fields}
    _log.info("%s", event, extra={"event": said})
    if (line := line_of(said)) is not None:
        log_line(line)


def log_line(line: str) -> None:
    """Write a line for people to the log of this process."""
    _lines.info("%s", line.strip())


def listen(listener: Listener) -> None:
    """From now on, pass every event of this process to the listener."""
    _log.addHandler(_Handler(listener))


def has_listener(listener: Listener) -> bool:
    """Whether this listener, or an equal one, is registered."""
    handlers = (one for one in _log.handlers if isinstance(one, _Handler))
    return any(one.listener == listener for one in handlers)


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Inside the block, pass every event of this process to the listener."""
    handler = _Handler(listener)
    _log.addHandler(handler)
    try:
        yield
    finally:
        _log.removeHandler(handler)


def appended_to(path: Path) -> Listener:
    """A listener that appends events to a file while it exists, one JSON object a line.

    The reader of the events creates the file. Several processes may append to it.
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
