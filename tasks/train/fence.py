"""The fence round a run's checkpoints: what a holder that lost its lease still writes does no harm.

Asking the ledger "still mine?" before a write is not enough: a process may be stopped between the answer and the write. So the
store itself tells an older lease from a newer one:

- A holder enters before it reads or writes a checkpoint: it adds `checkpoints/lease-<token>-from-<step>`, the step that it goes
  on from. From then on no checkpoint of a smaller token and a later step counts, whenever it was written (`standing`).
- Before it writes a checkpoint it looks who has entered, and it writes each object only where what lies there is what lay there
  at that look (`put`). A holder that has since been followed by another can't replace what that one wrote.

Tokens are the ledger's, larger for each later lease; 0 is for training without a lease, which is not fenced.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Protocol, TypeVar

from trainwright.tasks.errors import RunHeld
from trainwright.tasks.objects import ObjectStore

FOLDER = "checkpoints/"
_ENTRY = re.compile(rf"^{FOLDER}lease-(\d+)-from-(\d+)$")
_ATTEMPTS = 5


class Fenced(Protocol):
    """A checkpoint's state, as far as it matters here."""

    step: int
    token: int


State = TypeVar("State", bound=Fenced)


def enter(store: ObjectStore, token: int, step: int) -> None:
    """From now on the checkpoints of smaller tokens count up to this step. Raises RunHeld where a larger token has entered.

    A token that has entered already stays with the step that it entered with.
    """
    if token == 0:
        return
    entries = _entries(item.key for item in store.list(f"{FOLDER}lease-"))
    _require_newest(store, token, entries)
    if token not in entries:
        store.put(f"{FOLDER}lease-{token:010d}-from-{step:08d}", b"")


def standing(store: ObjectStore, states: Iterable[State]) -> list[State]:
    """Those of the checkpoints' states that count, in their order."""
    entries = _entries(item.key for item in store.list(f"{FOLDER}lease-"))
    return [
        state for state in states if all(state.token >= token or state.step <= step for token, step in entries.items())
    ]


def put(store: ObjectStore, token: int, objects: dict[str, bytes]) -> None:
    """Write a checkpoint's objects, in their order, unless the lease is an old one by now. Raises RunHeld where it is."""
    if token == 0:
        for key, data in objects.items():
            store.put(key, data)
        return
    left = dict(objects)
    for _ in range(_ATTEMPTS):
        there = {item.key: item.etag for item in store.list(FOLDER)}
        _require_newest(store, token, _entries(there))
        for key in list(left):
            if not store.swap(key, left[key], there.get(key)):
                break  # an older holder's late write came between: look again
            del left[key]
        else:
            return
    raise RunHeld(f"{store.uri}: another writes to {next(iter(left))} at the same time; nothing of its was replaced")


def _entries(keys: Iterable[str]) -> dict[int, int]:
    """Who has entered: token -> the step that it goes on from."""
    return {int(match[1]): int(match[2]) for key in keys if (match := _ENTRY.match(key))}


def _require_newest(store: ObjectStore, token: int, entries: dict[int, int]) -> None:
    if entries and max(entries) > token:
        raise RunHeld(
            f"{store.uri}: a later lease ({max(entries)}) goes on with this run; what lease {token} would write is refused"
        )
