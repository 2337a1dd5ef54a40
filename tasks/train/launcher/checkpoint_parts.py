"""What ranks report of their parts of checkpoints, by worker group, and who waits for an answer."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from trainwright.tasks.train.checkpoint.confirmations import Confirmations
from trainwright.tasks.train.launcher.rank_process import RankProcess

Message = dict[str, Any]


class CheckpointParts:
    """The parts of all groups of a launch; answers go to the rank that asked."""

    def __init__(self) -> None:
        self._parts: dict[int, Confirmations] = {}
        self._waiting: dict[int, tuple[RankProcess, int]] = {}
        """by generation: who waits until all parts are reported, and the number of its question"""

    def begin(self, generation: int, members: Collection[int]) -> None:
        """A worker group was formed."""
        self._parts[generation] = Confirmations(members)

    def note(self, number: int, message: Message) -> None:
        """A rank reports its part of a checkpoint."""
        self._parts[message["generation"]].note(number, message)
        self._answer_waiting()

    def answer(
        self, process: RankProcess, about: str, number: int, step: int = 0, generation: int = 0
    ) -> None:
        """Answer a rank's question: `parts` (once all are reported), `stored` or `write`."""
        if about == "parts":
            self._parts[generation].ask(step)
            self._waiting[generation] = process, number
            self._answer_waiting()
        else:
            found = self._parts[generation].known(step) if about == "stored" else {}
            process.channel.send("answer", number=number, **found)

    def lost(self, process: RankProcess) -> None:
        """The process of a rank has ended."""
        assert process.number is not None
        for parts in self._parts.values():
            parts.lost(process.number)
        self._waiting = {key: one for key, one in self._waiting.items() if one[0] is not process}
        self._answer_waiting()

    def _answer_waiting(self) -> None:
        for generation, (process, number) in list(self._waiting.items()):
            if (found := self._parts[generation].answer()) is not None:
                del self._waiting[generation]
                process.channel.send("answer", number=number, **found)
