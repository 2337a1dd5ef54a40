"""Proves of any lists of actions that every message that is sent is received.

Between two ranks, receives come in the order of the sends; separately for each direction. A rank
receives before the pass of a micro-batch that needs the message, and sends after the pass that
makes it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from trainwright.tasks.allocate.actions.action import ACTIVATIONS, MESSAGES, Action


def message_problem(ranks: Sequence[Sequence[Action]]) -> str | None:
    """Why messages would be lost or mixed up, or None."""
    sends: dict[tuple[int, ...], list[Action]] = {}
    receives: dict[tuple[int, ...], list[Action]] = {}
    for rank, actions in enumerate(ranks):
        for action in actions:
            if action.kind not in MESSAGES:
                continue
            end = 0 if action.kind == "send" else 1
            group = action.group
            if (
                len(group) != 2
                or group[0] == group[1]
                or not set(group) <= set(range(len(ranks)))
                or group[end] != rank
                or action.started != (action.kind == "send")
            ):
                return f"rank {rank}: {action.name} is a {action.kind} of the ranks {group}"
            found = sends if action.kind == "send" else receives
            found.setdefault(group, []).append(action)
        if (reason := _misplaced(actions)) is not None:
            return f"rank {rank}: {reason}"
    for group in sorted(sends.keys() | receives.keys()):
        given, taken = sends.get(group, []), receives.get(group, [])
        if len({one.name for one in given}) < len(given):
            return f"rank {group[0]} sends rank {group[1]} two messages of one name"
        for one, other in itertools.zip_longest(given, taken):
            names = ["nothing" if each is None else each.name for each in (one, other)]
            if names[0] != names[1]:
                return f"rank {group[0]} sends {names[0]}, rank {group[1]} expects {names[1]}"
    return None


def _misplaced(actions: Sequence[Action]) -> str | None:
    """Messages and the passes of the same micro-batch, whichever comes first."""
    passes: dict[tuple[str, int], list[int]] = {}
    for place, action in enumerate(actions):
        if action.kind in ("forward", "input-gradient"):
            passes.setdefault((action.kind, action.micro_batch), []).append(place)
    for place, action in enumerate(actions):
        if action.kind not in MESSAGES:
            continue
        kind = "forward" if action.name.startswith(ACTIVATIONS) else "input-gradient"
        places = passes.get((kind, action.micro_batch), [])
        if action.kind == "receive" and places and place > places[0]:
            return f"receives {action.name} after {actions[places[0]].name}"
        if action.kind == "send" and places and place < places[-1]:
            return f"sends {action.name} before {actions[places[-1]].name}"
    return None
