"""Proves of any lists of actions that ranks can execute them.

It executes the lists without doing the work. A blocking transfer ends once all of its group have
reached it. Libraries match transfers by their order, so those of two ranks must come in the same
order on both, separately for blocking and for started ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from trainwright.tasks.allocate.layouts.actions import COMPUTE, TRANSFERS, Action

_NOTHING = ("", "nothing", ())


def problem_of(
    ranks: Sequence[Sequence[Action]], trained: Mapping[str, set[int]], local_steps: int = 1
) -> str | None:
    """Why the lists can't be executed, or None if they can.

    `trained` has the ranks that hold each layer with parameters: each updates it exactly once in
    each local step, after its last weight gradient and after the transfers of its gradients have
    ended.
    """
    return (
        _foreign_group(ranks)
        or _unlike_order(ranks)
        or _deadlock(ranks)
        or _without_wait(ranks)
        or _updates(ranks, trained, local_steps)
    )


def _foreign_group(ranks: Sequence[Sequence[Action]]) -> str | None:
    for rank, actions in enumerate(ranks):
        for action in actions:
            if action.kind in TRANSFERS and (
                rank not in action.group or not set(action.group) <= set(range(len(ranks)))
            ):
                return f"rank {rank}: {action.name} is a transfer of the ranks {action.group}"
    return None


def _unlike_order(ranks: Sequence[Sequence[Action]]) -> str | None:
    """Two ranks must see the transfers that they share in the same order."""
    for one, actions in enumerate(ranks):
        for other in range(one + 1, len(ranks)):
            for started in (False, True):
                mine, theirs = (
                    [
                        (action.kind, action.name, action.group)
                        for action in each
                        if action.kind in TRANSFERS
                        and action.started == started
                        and {one, other} <= set(action.group)
                    ]
                    for each in (actions, ranks[other])
                )
                if mine != theirs:
                    pair = next(
                        pair
                        for pair in itertools.zip_longest(mine, theirs, fillvalue=_NOTHING)
                        if pair[0] != pair[1]
                    )
                    return f"ranks {one} and {other}: {pair[0][1]} would meet {pair[1][1]}"
    return None


def _deadlock(ranks: Sequence[Sequence[Action]]) -> str | None:
    """Run the lists; None if all of them end."""
    at = [0] * len(ranks)
    begun: dict[str, set[int]] = {}
    members: dict[str, tuple[int, ...]] = {}
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(ranks):
            while at[rank] < len(actions):
                action = actions[at[rank]]
                if action.kind in TRANSFERS:
                    begun.setdefault(action.name, set()).add(rank)
                    members[action.name] = action.group
                ends = action.kind in COMPUTE or action.started
                if not ends and not begun.get(action.name, set()) >= set(
                    members.get(action.name, action.group)
                ):
                    break
                at[rank] += 1
                moved = True
    stuck = [rank for rank, place in enumerate(at) if place < len(ranks[rank])]
    if not stuck:
        return None
    rank = stuck[0]
    return f"rank {rank} would wait for ever at {ranks[rank][at[rank]].name}"


def _without_wait(ranks: Sequence[Sequence[Action]]) -> str | None:
    """Every started transfer is waited for once, later."""
    for rank, actions in enumerate(ranks):
        open_ones: set[str] = set()
        for action in actions:
            if action.kind in TRANSFERS and action.started:
                if action.name in open_ones:
                    return f"rank {rank}: {action.name} is started twice"
                open_ones.add(action.name)
            elif action.kind == "wait":
                if action.name not in open_ones:
                    return f"rank {rank}: waits for {action.name}, which was not started"
                open_ones.remove(action.name)
        if open_ones:
            return f"rank {rank}: {min(open_ones)} is never waited for"
    return None


def _updates(
    ranks: Sequence[Sequence[Action]], trained: Mapping[str, set[int]], local_steps: int
) -> str | None:
    for layer, holders in trained.items():
        for rank, actions in enumerate(ranks):
            updates = [
                place
                for place, action in enumerate(actions)
                if action.kind == "update" and action.layer == layer
            ]
            steps = local_steps if rank in holders else 0
            if len(updates) != steps:
                return f"rank {rank} updates {layer} {len(updates)} times"
            if not updates:
                continue
            gradient = [
                place for place, action in enumerate(actions) if _makes_gradient_of(action, layer)
            ]
            for begin, end in itertools.pairwise([-1, *updates]):
                if not any(begin < place < end for place in gradient):
                    return f"rank {rank} updates {layer} without a weight gradient"
            if gradient[-1] > updates[-1]:
                return f"rank {rank} updates {layer} before {actions[gradient[-1]].name}"
    return None


def _makes_gradient_of(action: Action, layer: str) -> bool:
    """Whether the action makes or moves the layer's gradient."""
    if action.kind == "weight-gradient":
        return action.layer == layer
    is_sum = action.kind in ("wait", "sum") and action.chunk is not None
    return is_sum and action.chunk is not None and layer in action.chunk.layers
