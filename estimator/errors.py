"""The root of every error that trainwright raises on purpose.

    TrainwrightError
    ├── BadInput            the user's input is wrong: names the field, the value, what is allowed
    └── BusyMachine         the machine did other work while it was measured

`tasks.errors` has the rest of the tree.
"""

from __future__ import annotations

from typing import Any


class TrainwrightError(Exception):
    """An error that a caller can handle. Its message is one line: the thing, the cause, what to do.

    `kind` names the error in JSON documents, `exit_code` is that of the command line, `details` are
    facts as JSON (which limit binds, who holds what). `run` is the URI of the run that it ended, if
    any.
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
    """The user's input can't be used.

    The message names the field, what was given and what is allowed.
    """

    kind = "bad_input"
    exit_code = 2


class BusyMachine(TrainwrightError):
    """The machine did too much other work while it was measured: measure again when it is idle."""

    kind = "busy"
