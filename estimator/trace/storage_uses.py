"""Finds what keeps each storage for the backward pass: the module's call whose node saved it.

Autograd numbers its nodes in the order of the forward pass. So the operation that was dispatched
when a backward operation's node got its number is known, and the call in which it ran. Loads torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch  # noqa: TID253 - recording runs in a separate process


@dataclass
class CallSeen:
    """A module's forward pass, as places in the order of events (`recorder.Lives`)."""

    name: str
    parent: int
    begin: int
    given: frozenset[int]
    end: int = -1
    stop: int = -1
    """after the last storage that its nodes save; -1: they save none"""
    backward: int = -1
    done: int = -1
    overwritten: bool = False
    """whether something writes into its arguments: then it can't be done again"""


@dataclass
class StorageUses:
    """Which calls of modules save which storages, and when these are read."""

    calls: list[CallSeen] = field(default_factory=list)
    read_last: dict[int, int] = field(default_factory=dict)
    """by storage: the place after which the forward pass does not read it"""
    saves: dict[int, dict[int, int]] = field(default_factory=dict)
    """by storage, by innermost call (-1: none): the place after which the backward pass does not
    read it"""
    _running: list[int] = field(default_factory=list)
    _numbers: list[int] = field(default_factory=list)
    """autograd's next number at each operation of a forward pass"""
    _places: list[tuple[int, int]] = field(default_factory=list)
    """the operation's place, and its innermost call"""
    _before: int = 0
    """how many storages had been made when the backward pass began"""

    def call_begins(self, name: str, given: Sequence[int], place: int) -> None:
        """A module begins its forward pass."""
        self.calls.append(CallSeen(name, self._innermost, place, frozenset(given)))
        self._running.append(len(self.calls) - 1)

    def call_ends(self, place: int) -> None:
        """The module that began last has ended."""
        self.calls[self._running.pop()].end = place

    @property
    def _innermost(self) -> int:
        return self._running[-1] if self._running else -1

    def backward_begins(self, made: int) -> None:
        """The backward pass begins; so many storages have been made."""
        self._before = made

    def written(self, numbers: Sequence[int]) -> None:
        """An operation of a forward pass writes into these storages."""
        found = set(numbers)
        for call in self.calls:
            call.overwritten |= not found.isdisjoint(call.given)

    def read(self, numbers: Sequence[int], before: int, after: int) -> None:
        """An operation has read these storages; its results are made between the places."""
        node: Any = torch._C._current_autograd_node()
        if node is None:
            next_number = int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
            self._numbers.append(next_number)
            self._places.append((before, self._innermost))
            self.read_last.update(dict.fromkeys(numbers, after))
            return
        saved = [one for one in numbers if one < self._before]
        if not saved or node.name().endswith("AccumulateGrad"):
            return
        at = bisect_right(self._numbers, node._sequence_nr())
        if at == len(self._places):
            return
        saved_at, call = self._places[at]
        for one in saved:
            self.saves.setdefault(one, {})[call] = after
        while call >= 0:
            seen = self.calls[call]
            seen.stop = max(seen.stop, saved_at)
            seen.backward = before if seen.backward < 0 else seen.backward
            seen.done = after
            call = seen.parent
