"""What the launcher knows of checkpoints that are being written: which ranks' parts are safe, and where. Does no I/O."""

from __future__ import annotations

from typing import Any

STORED, SPILLED, FAILED = "stored", "spilled", "failed"


class Confirmations:
    """The ranks' words on their parts, and rank 0's question whether all are in."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._parts: dict[int, dict[int, dict[str, Any]]] = {}
        self._awaited: int | None = None

    def note(self, rank: int, message: dict[str, Any]) -> None:
        """A rank's part of the checkpoint of `step` is `where`: stored, spilled (on the rank's own disk), or failed.

        What is spilled comes into the store later, and then only `where` is said.
        """
        of_step = self._parts.setdefault(int(message["step"]), {})
        of_step[rank] = {"files": {}, **of_step.get(rank, {}), **message}

    def ask(self, step: int) -> None:
        """Rank 0 waits until every rank has said something of a step."""
        self._awaited = step

    def answer(self) -> dict[str, Any] | None:
        """What rank 0 waits for, once; None while it isn't known, or rank 0 doesn't wait."""
        if self._awaited is None or len(self._parts.get(self._awaited, ())) < self._ranks:
            return None
        step, self._awaited = self._awaited, None
        return self.known(step)

    def known(self, step: int) -> dict[str, Any]:
        """The files of all ranks with sizes and digests, whether all lie in the store, and why it failed, if it did."""
        parts = self._parts.get(step, {})
        said = [one["where"] for one in parts.values()]
        stored = len(said) == self._ranks and set(said) == {STORED}
        failed = next((one["why"] for one in parts.values() if one["where"] == FAILED), None)
        if stored or failed is not None:  # nothing is asked about it, or what came before it, again
            self._parts = {key: value for key, value in self._parts.items() if key > step}
        files = {name: file for one in parts.values() for name, file in one["files"].items()}
        return {"files": files, "stored": stored, "failed": failed}
