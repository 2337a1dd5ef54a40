"""What a rank does in a step for the layers that are not summed as gradients.

In a layout that averages some layers and not others, all ranks do joint steps: of rank r's loss
(b_r / B) · loss_r, averaged layers keep the rank's own gradient h_r, here divided by b_r / B.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch  # noqa: TID253 - only ranks import this

from trainwright.estimator.structure import LayerFacts
from trainwright.tasks.runs.artefacts.layout import Layout
from trainwright.tasks.train.exchange.group_exchange import Exchange, Started
from trainwright.tasks.train.layouts.cuts import cuts_among
from trainwright.tasks.train.layouts.factors import Factors, ProductPhase
from trainwright.tasks.train.layouts.late_multiply import LateMultiplied
from trainwright.tasks.train.layouts.sharded import Sharded


class LayoutWork:
    """The layers of a model that a layout does not sum.

    Each step calls `begin`, sets `part` and `last` for each backward pass, then calls `send_rest`
    and `finish`.
    """

    def __init__(
        self,
        layout: Layout | None,
        layers: Sequence[LayerFacts],
        model: torch.nn.Module,
        exchange: Exchange,
        *,
        widens: bool = False,
    ) -> None:
        """`widens`: send numbers of half precision in fp32, as ranks have unlike half types."""
        self._layout, self._exchange = layout, exchange
        self._type = torch.bfloat16 if layout and layout.factor_type == "bf16" else None
        how = {one.name: layout.how(one.name) for one in layers} if layout is not None else {}
        modules: dict[str, Any] = dict(model.named_modules())
        # The backward pass reaches the last layers first.
        names = [one.name for one in reversed(layers)]
        self._late = [
            LateMultiplied(name, modules[name], self._made)
            for name in names
            if how[name] == "factors"
        ]
        self.sharded = [
            Sharded(name, modules[name], exchange) for name in names if how[name] == "rows"
        ]
        if self.sharded:
            # torch's fused transformer layers would take a module's rows for the whole weight.
            torch.backends.mha.set_fastpath_enabled(False)
        apart = {id(one) for late in self._late for one in late.parameters}
        apart |= {id(one) for sharded in self.sharded for one in sharded.parameters.values()}
        known = [name for one in layers for name in one.parameters]
        order = {name: place for place, name in enumerate(known)}
        named = sorted(model.named_parameters(), key=lambda pair: order.get(pair[0], -1))
        rest = [(name, one) for name, one in named if id(one) not in apart]
        averaged = set[int]()
        if layout is not None and layout.averages:
            owner = {name: one.name for one in layers for name in one.parameters}
            averaged = {
                id(one) for name, one in rest if layout.how(owner.get(name, "")) == "average"
            }
        self.averaged = [one for _, one in rest if id(one) in averaged]
        """the parameters that are averaged from time to time"""
        self.summed = [one for _, one in rest if id(one) not in averaged]
        """the parameters whose gradients are summed, in the order of the forward pass"""
        self.share = 1.0
        """b_r / B, this rank's share of the step's samples"""
        self._joint_steps = bool(averaged) and layout is not None and not layout.alone
        self.members: list[int] = []
        """the devices' numbers, in the order of ranks"""
        self.computed: Callable[[str, ProductPhase, float], None] = lambda *_: None
        """called after a product of the joint batch: layer, phase, samples · share of rows"""
        self._rows_per_sample = {
            one.name: one.dense.rows_per_sample for one in layers if one.dense is not None
        }
        for each in self.sharded:
            each.computed, each.widens = self._computed, widens
        self.last = True
        """whether this is the step's last backward pass"""
        self.loss_scale = 1.0
        self.own_square, self.joint_square = 0.0, 0.0
        """|h|² of this rank's factors, and |g|² of all ranks' together"""
        self.squares: list[float] = []
        """|h_r|² of each rank's samples in the rows that this rank holds"""
        self.rows_square = 0.0
        """|g|² of the rows that this rank holds"""
        self.overflowed = False
        """whether a factor of this rank is not finite"""
        self._sent: list[tuple[LateMultiplied, Started[list[list[torch.Tensor]]]]] = []

    def _computed(self, layer: str, phase: ProductPhase, rows: float) -> None:
        self.computed(layer, phase, rows / self._rows_per_sample[layer])

    @property
    def is_cut(self) -> bool:
        """Whether this rank holds only a part of the model."""
        return any(one.cuts is not None for one in self.sharded)

    def require_cut(self) -> None:
        """Raises RuntimeError if a sharded layer is not cut: a step would not train it."""
        whole = [one.name for one in self.sharded if one.cuts is None]
        if whole:
            raise RuntimeError(f"a step before `cut`: {', '.join(whole)} would not be trained")

    def cut(self, members: Sequence[int]) -> None:
        """Keep this rank's rows only. `members`: the devices' numbers, in the order of ranks."""
        self.members = list(members)
        if self._layout is None:
            return
        for one in self.sharded:
            one.cut(cuts_among(self._layout, one.name, one.total, members))

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter, Sharded]]:
        """The parameters of which this rank may hold only some rows."""
        for one in self.sharded:
            for name, parameter in one.parameters.items():
                yield name, parameter, one

    @property
    def late_parameters(self) -> list[torch.nn.Parameter]:
        """The parameters whose gradients every rank multiplies itself."""
        return [parameter for late in self._late for parameter in late.parameters]

    def parts(self) -> tuple[list[torch.nn.Parameter], float]:
        """The parameters whose gradients differ between ranks, and their |g|² over all ranks.

        Those of which this rank holds some rows, |g|² of all rows; and in joint steps the averaged
        ones, Σ_r b_r / B · |g_r|².
        """
        found = [parameter for _, parameter, _ in self.parameters()] if self.is_cut else []
        square = self.rows_square if self.is_cut else 0.0
        if self._joint_steps:
            found += self.averaged
            gradients = [one.grad for one in self.averaged if one.grad is not None]
            square += self.share * sum(float(one.double().square().sum()) for one in gradients)
        if not found:
            return [], 0.0
        own = torch.tensor([square], dtype=torch.float64)
        return found, float(self._exchange.sum_(own, "norm of parts"))

    def begin(self) -> None:
        """A step begins."""
        for late in self._late:
            late.begin()
        for one in self.sharded:
            one.begin()
        for parameter in self.averaged:
            parameter.grad = None
        self._sent.clear()
        self.own_square, self.joint_square, self.overflowed = 0.0, 0.0, False
        self.squares, self.rows_square = [0.0] * self._exchange.size, 0.0

    def begin_part(self, part: int, *, last: bool) -> None:
        """The forward pass of a micro-batch begins."""
        self.last = last
        for one in self.sharded:
            one.part = part

    def _made(self) -> None:
        """A layer has all its factors of a backward pass: send what is next, in order."""
        while (
            self.last and len(self._sent) < len(self._late) and self._late[len(self._sent)].complete
        ):
            self._send(self._late[len(self._sent)])

    def _send(self, late: LateMultiplied) -> None:
        own = late.own(self.loss_scale, self._type)
        square = late.square(own)
        self.own_square += square
        self.overflowed |= not math.isfinite(square)
        self._sent.append((late, self._gathered(own, late.name)))

    def _gathered(self, own: Factors, name: str) -> Started[list[list[torch.Tensor]]]:
        # In an order of their own: ranks may have unlike gradients to sum between them.
        return self._exchange.start_gather(own, f"factors {name}", order="gathers")

    def send_rest(self) -> None:
        """After the backward pass: send what is left, and make the gradients of sharded layers."""
        for late in self._late[len(self._sent) :]:
            self._send(late)
        for one in self.sharded:
            squares = one.finish(self.loss_scale)
            self.squares = [sum(pair) for pair in zip(self.squares, squares, strict=True)]
            gradients = [each.grad for each in one.parameters.values() if each.grad is not None]
            self.rows_square += sum(float(each.double().square().sum()) for each in gradients)
        self.overflowed |= not math.isfinite(self.rows_square)
        if self._joint_steps and self.loss_scale != 1:
            gradients = [one.grad for one in self.averaged if one.grad is not None]
            self.overflowed |= not all(bool(one.isfinite().all()) for one in gradients)

    def finish(self) -> None:
        """Wait for the factors of all ranks, and set the gradients."""
        for late, gathered in self._sent:
            parts = [Factors(*one) for one in self._exchange.finish(gathered)]
            self.joint_square += late.finish(parts)
            self._computed(late.name, "weight_gradient", sum(len(one.inputs) for one in parts))
        if self._joint_steps:
            self._own_gradients()

    def _own_gradients(self) -> None:
        """Set the averaged layers' gradients to those of this rank's own mean loss."""
        if not self.share:
            for parameter in self.averaged:
                parameter.grad = None
        gradients = [one.grad for one in self.averaged if one.grad is not None]
        if gradients:
            torch._foreach_div_(gradients, self.share * self.loss_scale)
