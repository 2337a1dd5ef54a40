"""What the launcher knows of the checkpoints that a world has begun: which ranks' parts are safe, and where. Does no I/O."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

STORED, SPILLED, FAILED = "stored", "spilled", "failed"


class Confirmations:
    """The words of a world's ranks on their parts, and the question of the first whether all are in."""

    def __init__(self, ranks: Collection[int]) -> None:
        self._ranks = set(ranks)
        self._parts: dict[int, dict[int, dict[str, Any]]] = {}
        self._awaited: int | None = None
        self._lost: set[int] = set()

    def note(self, rank: int, message: dict[str, Any]) -> None:
        """A rank's part of the checkpoint of `step` is `where`: stored, spilled (on the rank's own disk), or failed.

        What is spilled comes into the store later, and then only `where` is said.
        """
        of_step = self._parts.setdefault(int(message["step"]), {})
        of_step[rank] = {"files": {}, **of_step.get(rank, {}), **message}

    def lost(self, rank: int) -> None:
        """A rank has gone: what it had not brought into the store does not come any more."""
        self._lost |= self._ranks & {rank}

    def ask(self, step: int) -> None:
        """The first waits until every rank has said something of a step."""
        self._awaited = step

    def answer(self) -> dict[str, Any] | None:
        """What the first waits for, once; None while it isn't known, or it doesn't wait."""
        if self._awaited is None:
            return None
        parts = self._parts.get(self._awaited, {})
        if parts.keys() < self._ranks and self._lost <= parts.keys():
            return None
        step, self._awaited = self._awaited, None
        return self.known(step)

    def known(self, step: int) -> dict[str, Any]:
        """The files of all ranks with sizes and digests, whether all lie in the store, and why it failed, if it did."""
        parts = self._parts.get(step, {})
        said = [one["where"] for one in parts.values()]
        stored = len(said) == len(self._ranks) and set(said) == {STORED}
        gone = [rank for rank in sorted(self._lost) if parts.get(rank, {}).get("where") != STORED]
        failed = next((one["why"] for one in parts.values() if one["where"] == FAILED), None)
        if gone and failed is None:
            failed = f"rank {gone[0]} was lost before its part was in the store"
        if stored or failed is not None:  # nothing is asked about what came before it again
            self._parts = {key: value for key, value in self._parts.items() if key >= step}
        files = {name: file for one in parts.values() for name, file in one["files"].items()}
        return {"files": files, "stored": stored, "failed": failed}
