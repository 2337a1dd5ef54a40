"""What a process that measures says on stderr to who started it: JSON, one object a line."""

from __future__ import annotations

import json
import sys


def tell(**what: object) -> None:
    """Say it at once."""
    sys.stderr.write(json.dumps(what) + "\n")
    sys.stderr.flush()


def say(message: str, elapsed_s: float) -> None:
    """How far the measurement is."""
    tell(message=message, elapsed_s=elapsed_s)
