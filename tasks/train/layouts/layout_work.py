"""What a rank does in a step for the layers that are not summed as gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch  # noqa: TID253 - only ranks import this

from trainwright.estimator.structure import LayerFacts
from trainwright.tasks.runs.artefacts.layout import Layout
from trainwright.tasks.train.exchange.collective import Exchange
from trainwright.tasks.train.layouts.factors import Factors
from trainwright.tasks.train.layouts.late_multiply import LateMultiplied


class LayoutWork:
    """The layers of a model that a layout does not sum.

    Each step calls `begin`, sets `last` for its last backward pass, then calls `send_rest` and
    `finish`.
    """

    def __init__(
        self,
        layout: Layout | None,
        layers: Sequence[LayerFacts],
        model: torch.nn.Module,
        exchange: Exchange,
    ) -> None:
        self._exchange = exchange
        self._type = torch.bfloat16 if layout and layout.factor_type == "bf16" else None
        how = {one.name: layout.how(one.name) for one in layers} if layout is not None else {}
        modules = dict(model.named_modules())
        # The backward pass reaches the last layers first.
        self._late = [
            LateMultiplied(one.name, modules[one.name], self._made)
            for one in reversed(layers)
            if how.get(one.name) == "factors"
        ]
        apart = {id(one) for late in self._late for one in late.parameters}
        self.summed = [one for one in model.parameters() if id(one) not in apart]
        """the parameters whose gradients are summed"""
        self.last = True
        """whether this is the step's last backward pass"""
        self.loss_scale = 1.0
        self.own_square, self.joint_square = 0.0, 0.0
        """|h|² of this rank's factors, and |g|² of all ranks' together"""
        self.overflowed = False
        """whether a factor of this rank is not finite"""
        self._sent: list[tuple[LateMultiplied, Factors, Any]] = []

    def begin(self) -> None:
        """A step begins."""
        for late in self._late:
            late.begin()
        self._sent.clear()
        self.own_square, self.joint_square, self.overflowed = 0.0, 0.0, False

    def _made(self) -> None:
        """A layer has all its factors of a backward pass: send what is next, in order."""
        while (
            self.last and len(self._sent) < len(self._late) and self._late[len(self._sent)].complete
        ):
            self._send(self._late[len(self._sent)])

    def _send(self, late: LateMultiplied) -> None:
        own, exchange = late.own(self.loss_scale, self._type), self._exchange
        square = late.square(own)
        self.own_square += square
        self.overflowed |= not math.isfinite(square)
        others = [rank for rank in range(exchange.size) if rank != exchange.rank]
        handle = exchange.begin_transfer(
            f"factors {late.name}", dict.fromkeys(others, own), others, started=True
        )
        self._sent.append((late, own, handle))

    def send_rest(self) -> None:
        """After the backward pass: send what is left, such as layers that were not used."""
        for late in self._late[len(self._sent) :]:
            self._send(late)

    def finish(self) -> None:
        """Wait for the factors of all ranks, and set the gradients."""
        for late, own, handle in self._sent:
            came = self._exchange.finish_transfer(handle)
            parts = [
                own if rank == self._exchange.rank else Factors(*came[rank])
                for rank in range(self._exchange.size)
            ]
            self.joint_square += late.finish(parts)
