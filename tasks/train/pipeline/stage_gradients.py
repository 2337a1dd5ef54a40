"""Sums of gradients over the ranks that hold a parameter: one of each pipeline, for tied ones more.

As `layouts.gradients`, with a sum for each set of holders. A parameter that one rank holds alone is
in a set of its own, so that all gradients are treated alike.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch  # noqa: TID253 - only ranks import this

from trainwright.tasks.train.exchange.group_exchange import Exchange
from trainwright.tasks.train.exchange.rank_group import RankGroup
from trainwright.tasks.train.layouts.gradients import GradientSum
from trainwright.tasks.train.pipeline.stage_holders import Holders


class StageGradients:
    """The gradients of a stage's parameters. Used as a `GradientSum`.

    Sums over several ranks begin in the order of the backward pass, those of tied parameters last,
    so that any two ranks begin those that they share in the same order.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        holders: Holders,
        exchange: Exchange,
        chunk_bytes: int,
        pipeline_of: Sequence[int],
        apart: Collection[str] = (),
    ) -> None:
        """`parameters` and `holders` have the model's trained ones, in the forward order.

        Of those that this rank does not hold, it has no rows. `pipeline_of`: by rank. `apart` are
        those that are not summed: `note_used` says whether this rank used them.
        """
        self._rank = exchange.rank
        place = {name: number for number, name in enumerate(holders)}
        by_group: dict[tuple[int, ...], list[str]] = {}
        for name, group in holders.items():
            if self._rank in group and name not in apart:
                by_group.setdefault(group, []).append(name)
        self._absent = [
            (place[name], parameters[name])
            for name, group in holders.items()
            if self._rank not in group
        ]

        def ties(group: tuple[int, ...]) -> bool:
            return len({pipeline_of[rank] for rank in group}) < len(group)

        ordered = sorted(
            by_group.items(), key=lambda pair: (ties(pair[0]), -place[pair[1][-1]], pair[0])
        )
        self._sums: list[tuple[tuple[int, ...], GradientSum, list[int]]] = []
        """holders, their sum, and the place among all parameters of each in the sum"""
        self._sum_of: dict[int, GradientSum] = {}
        for group, names in ordered:
            some = [parameters[name] for name in names]
            found = GradientSum(
                some, RankGroup(exchange, group), chunk_bytes, others_wait=len(ordered) > 1
            )
            if self._sums:
                before = self._sums[-1][1]
                found.may_send = before.is_sent
                before.all_sent = found.send_full
            self._sums.append((group, found, [place[name] for name in reversed(names)]))
            self._sum_of |= {id(one): found for one in some}
        self._place = place
        self._apart = {name: 0.0 for name in apart if name in place}
        """1 for each parameter that is not summed and was used here in this step"""
        self._last, self._scale, self._overflowed = True, 1.0, False

    def release(self) -> None:
        """Remove the hooks on parameters."""
        for _, one, _ in self._sums:
            one.release()

    def begin(self) -> None:
        """Start a step: drop the gradients of the previous one."""
        self._overflowed = False
        self._apart = dict.fromkeys(self._apart, 0.0)
        for _, one, _ in self._sums:
            one.begin()
        for _, parameter in self._absent:
            parameter.grad = None

    def arrived(self, parameter: torch.nn.Parameter) -> None:
        """A gradient was added to a parameter's outside of autograd."""
        self._sum_of[id(parameter)].arrived(parameter)

    def backward_ended(self, later: Collection[int]) -> None:
        """The backward passes have ended; gradients of `later`, ids of parameters, still come."""
        for _, one, _ in self._sums:
            one.backward_ended(later)

    @property
    def last(self) -> bool:
        """Whether gradients that arrive now are the step's last."""
        return self._last

    @last.setter
    def last(self, last: bool) -> None:
        self._last = last
        for _, one, _ in self._sums:
            one.last = last

    @property
    def loss_scale(self) -> float:
        """The factor on the loss besides w_r / B."""
        return self._scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        self._scale = scale
        for _, one, _ in self._sums:
            one.loss_scale = scale

    @property
    def own_square(self) -> float:
        """|h|² of what this rank has sent in this step."""
        return sum(one.own_square for _, one, _ in self._sums)

    @property
    def overflowed(self) -> bool:
        """Whether this rank made a gradient that is not finite."""
        return self._overflowed or any(one.overflowed for _, one, _ in self._sums)

    @overflowed.setter
    def overflowed(self, found: bool) -> None:
        self._overflowed = found

    @property
    def used(self) -> list[float]:
        """By parameter of the model: 1 if it had a gradient here in this step, else 0."""
        found = [self._apart.get(name, 0.0) for name in self._place]
        for _, one, places in self._sums:
            for place, used in zip(places, one.used, strict=True):
                found[place] = used
        return found

    def note_used(self, name: str, *, used: bool) -> None:
        """Whether a parameter that is not summed had a gradient here in this step."""
        if name in self._apart:
            self._apart[name] = float(used)

    def send_rest(self) -> None:
        """Send the remaining chunks after the last backward pass."""
        for _, one, _ in self._sums:
            one.send_rest()

    def wait(self) -> None:
        """Wait until all sums have ended here."""
        for _, one, _ in self._sums:
            one.wait()

    def finish(self, used_anywhere: Sequence[float], factor: float = 1.0) -> None:
        """Set every `grad` to the sum over its holders times `factor`; None if none used it.

        That of a parameter without rows here is empty, so that the optimizer counts its steps.
        """
        for _, one, places in self._sums:
            one.finish([used_anywhere[place] for place in places], factor)
        for place, parameter in self._absent:
            parameter.grad = torch.zeros_like(parameter) if used_anywhere[place] else None

    def joint_square(self) -> float:
        """0: `held_square` of all ranks adds up to |g|²."""
        return 0.0

    def held_square(self) -> float:
        """|g|² of the parameters of which this rank is the first holder, before `finish`."""
        return sum(one.joint_square() for group, one, _ in self._sums if group[0] == self._rank)
