"""The root of every error trainwright raises on purpose.

    TrainwrightError
    ├── BadInput            a person's input is wrong: field, given, allowed
    └── BusyMachine         what was measured of this machine is worth nothing: it did other things meanwhile

`tasks.errors` grows the rest of the tree.
"""

from __future__ import annotations

from typing import Any


class TrainwrightError(Exception):
    """Something a caller can handle. The message is one line: the thing, the cause, the way out.

    `kind` names it in JSON documents, `exit_code` is what the command line ends with, `details` are JSON-able facts
    that belong to it (which limit binds, who holds what). `run` is the URI of the run that it ended, where it ended one.
    """

    kind = "failed"
    exit_code = 1

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(" ".join(message.split()))
        self.details = details
        self.run: str | None = None

    def document(self) -> dict[str, Any]:
        """The error as the JSON object that `--json` prints and status.json keeps."""
        return {"kind": self.kind, "message": str(self), **self.details}


class BadInput(TrainwrightError):
    """What a person gave can't be used: the message says the field, what was given and what is allowed."""

    kind = "bad_input"
    exit_code = 2


class BusyMachine(TrainwrightError):
    """The machine did too much else while it was measured: measure again when it is quiet."""

    kind = "busy"
