"""What a stage's passes take its rank beside their layers (`estimator.predict.pass_cost`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainwright.estimator.curves import DeviceCurve
from trainwright.estimator.predict.pass_cost import PassCost, is_part_of_its_time
from trainwright.tasks.allocate.actions.action import COMPUTE, MESSAGES, Action
from trainwright.tasks.allocate.actions.transfer_sizes import Moved

OwnWork = Mapping[tuple[int, str], float]
"""Seconds by rank and name of the first computation of a pass, which takes so much longer."""


@dataclass
class _Pass:
    first: str
    messages: int = 0
    moved_bytes: float = 0.0
    layers: set[str] = field(default_factory=set)
    compute_s: float = 0.0


def own_work(
    lists: Sequence[Sequence[Action]],
    curves: Sequence[DeviceCurve],
    cost: PassCost,
    seconds: Callable[[Action], Any],
    moved: Callable[[Action], Moved],
) -> OwnWork:
    """The own work of each pass in some lists of actions; `curves` are the ranks'."""
    found = {}
    for rank, (actions, curve) in enumerate(zip(lists, curves, strict=True)):
        own, part = cost.on(curve), is_part_of_its_time(curve)
        for one in _passes(actions, rank, seconds, moved):
            spent_s = own.seconds(one.messages, one.moved_bytes, len(one.layers))
            found[rank, one.first] = max(0.0, spent_s - one.compute_s) if part else spent_s
    return found


def _passes(
    actions: Sequence[Action],
    rank: int,
    seconds: Callable[[Action], Any],
    moved: Callable[[Action], Moved],
) -> Iterator[_Pass]:
    """The passes of a rank. What it receives belongs to the next one, what it sends to the last."""
    one, received = _Pass(""), list[Action]()
    for action in actions:
        if action.begins:
            if one.first:
                yield one
            one = _Pass(action.name, len(received), sum(_bytes(moved(each)) for each in received))
            received = []
        if action.kind == "agree":
            break
        if action.kind == "receive":
            received.append(action)
        elif action.kind in MESSAGES:
            one.messages += 1
            one.moved_bytes += _bytes(moved(action))
        elif action.kind in COMPUTE and action.kind != "update":
            one.layers.add(action.layer)
            one.compute_s += float(seconds(action)[rank])
    if one.first:
        yield one


def _bytes(moved: Moved) -> float:
    return float(moved.pairs.sum())
