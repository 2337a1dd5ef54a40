"""Proves of any lists of actions that ranks can execute them.

It executes the lists without doing the work. A blocking transfer ends once all of its group have
reached it. Libraries match transfers by their order, so those of two ranks must come in the same
order on both, separately for blocking and for started ones. What a rank does with a layer must come
in the order in which one thing needs another.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from trainwright.tasks.allocate.actions.action import COMPUTE, MESSAGES, TRANSFERS, Action
from trainwright.tasks.allocate.actions.message_check import message_problem

_PASSES = ("forward", "input-gradient")
_OF_ROWS = ("gather", "exchange", "scatter-sum")
"""Blocking transfers of a layer whose rows are on several ranks."""


def problem_of(
    ranks: Sequence[Sequence[Action]], trained: Mapping[str, set[int]], local_steps: int = 1
) -> str | None:
    """Why the lists can't be executed, or None if they can.

    `trained` has the ranks that hold each layer with parameters, in the order of the forward pass:
    each updates it exactly once in each local step, after its last weight gradient and after the
    transfers of its gradients have ended.
    """
    return (
        _foreign_group(ranks)
        or message_problem(ranks)
        or _unlike_order(ranks)
        or _deadlock(ranks)
        or _without_wait(ranks)
        or _passes(ranks, trained)
        or _weight_gradients(ranks, trained)
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
                        action
                        for action in each
                        if action.kind in TRANSFERS
                        and action.started == started
                        and {one, other} <= set(action.group)
                    ]
                    for each in (actions, ranks[other])
                )
                for pair in itertools.zip_longest(mine, theirs):
                    if (reason := _unlike(*pair)) is not None:
                        return f"ranks {one} and {other}: {reason}"
    return None


def _unlike(mine: Action | None, theirs: Action | None) -> str | None:
    """Why two transfers that meet are not the same one."""
    if mine is None or theirs is None or mine.name != theirs.name:
        names = ["nothing" if each is None else each.name for each in (mine, theirs)]
        return f"{names[0]} would meet {names[1]}"
    if mine.kind != theirs.kind:
        return f"{mine.name} is a {mine.kind} for one and a {theirs.kind} for the other"
    if mine.group != theirs.group:
        return f"{mine.name} is of the ranks {mine.group} for one, {theirs.group} for the other"
    return None if mine.chunk == theirs.chunk else f"{mine.name} is of unlike gradients"


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
                if action.kind in TRANSFERS or action.kind in MESSAGES:
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
        open_ones: dict[str, Action] = {}
        for action in actions:
            if action.kind in TRANSFERS and action.started:
                if action.name in open_ones:
                    return f"rank {rank}: {action.name} is started twice"
                open_ones[action.name] = action
            elif action.kind == "wait":
                if action.name not in open_ones:
                    return f"rank {rank}: waits for {action.name}, which was not started"
                begun = open_ones.pop(action.name)
                if (begun.group, begun.chunk) != (action.group, action.chunk):
                    return f"rank {rank}: waits for another {action.name} than it started"
        if open_ones:
            return f"rank {rank}: {min(open_ones)} is never waited for"
    return None


def _passes(ranks: Sequence[Sequence[Action]], trained: Mapping[str, set[int]]) -> str | None:
    """The backward pass of a micro-batch goes back through the layers of its forward pass."""
    for rank, actions in enumerate(ranks):
        by_part: dict[int, list[Action]] = {}
        for action in actions:
            if action.kind in (*_PASSES, *_OF_ROWS) and not action.started:
                by_part.setdefault(action.micro_batch, []).append(action)
        for part, found in by_part.items():
            forward = [one for one in found if one.kind == "forward"]
            wanted: list[tuple[str, str]] = [
                (kind, one.layer)
                for one in forward
                for kind in (("gather", "forward", "exchange") if one.joint else ("forward",))
            ]
            # Back the same way: what was gathered is summed.
            back = {"gather": "scatter-sum", "forward": "input-gradient"}
            wanted += [(back.get(kind, kind), layer) for kind, layer in reversed(wanted)]
            own: list[tuple[str, str]] = [(one.kind, one.layer) for one in found]
            # Nobody needs the gradient of the inputs of the first layer with parameters.
            free = ("scatter-sum", next(iter(trained), ""))
            own, wanted = ([one for one in some if one != free] for some in (own, wanted))
            for given, due in itertools.zip_longest(own, wanted, fillvalue=("nothing", "")):
                if given != due:
                    what = f"{' '.join(given)} in place of {' '.join(due)}".strip()
                    return f"rank {rank}, micro-batch {part}: {what}"
    return None


def _weight_gradients(
    ranks: Sequence[Sequence[Action]], trained: Mapping[str, set[int]]
) -> str | None:
    """Each rank makes a layer's gradients after the backward passes, and sends them after that."""
    for layer, holders in trained.items():
        for rank in sorted(holders):
            reason = _weight_gradient(ranks[rank], layer, alone=len(holders) == 1)
            if reason is not None:
                return f"rank {rank}: {reason}"
    return None


def _weight_gradient(actions: Sequence[Action], layer: str, *, alone: bool) -> str | None:
    own = [one for one in actions if one.layer == layer and one.chunk is None]
    factors = [one.name for one in own if one.kind == "gather" and one.started]
    parts = [one.micro_batch for one in own if one.kind == "forward"]
    made, passed, came = list[int](), set[int](), False
    for one in own:
        if one.kind == "input-gradient":
            passed.add(one.micro_batch)
        elif one.name in factors:
            if len(passed) < len(parts):
                return f"{one.name} begins before the last input gradient of {layer}"
            came = one.kind == "wait"
        elif one.kind == "weight-gradient":
            if not (came if factors else one.micro_batch in passed):
                return f"{one.name} comes before its factors"
            made.append(one.micro_batch)
    if len(made) != (1 if factors else len(parts)) or len(made) != len(set(made)):
        return f"{layer} has {len(made)} weight gradients for {len(parts)} micro-batches"
    moved = False
    done: dict[tuple[str, str], int] = {
        (one.kind, one.layer): place for place, one in enumerate(actions)
    }
    for place, one in enumerate(actions):
        if one.chunk is None or one.kind == "wait" or layer not in one.chunk.layers:
            continue
        moved, needs = True, "update" if one.kind == "average" else "weight-gradient"
        if done.get((needs, layer), -1) > place:
            return f"{one.name} begins before the last {needs} of {layer}"
    divided = any(one.joint for one in own if one.kind == "forward")
    if not (alone or moved or factors or divided):
        return f"{layer} is never summed, gathered or averaged"
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
            for step, place in enumerate(updates[:-1]):
                if any(_is_forward_of(one, layer, step + 1) for one in actions[:place]):
                    return f"rank {rank} updates {layer} after it went on with step {step + 1}"
    return None


def _is_forward_of(action: Action, layer: str, part: int) -> bool:
    return (action.kind, action.layer, action.micro_batch) == ("forward", layer, part)


def _makes_gradient_of(action: Action, layer: str) -> bool:
    """Whether the action makes or moves the layer's gradient."""
    if action.kind == "weight-gradient":
        return action.layer == layer
    is_sum = action.kind in ("wait", "sum") and action.chunk is not None
    return is_sum and action.chunk is not None and layer in action.chunk.layers
