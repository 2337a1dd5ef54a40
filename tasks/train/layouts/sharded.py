"""Sharded layers: each rank holds some rows of a dense layer's weight, as many as it can work on.

For Linear with rows W_s of the weight on rank s, and x_r the inputs of rank r's samples:

    forward    every rank gets all x; rank s computes y_rs = x_r · W_sᵀ + b_s and sends it to r
    backward   rank r sends ∂y_rs to s; rank s computes ∂x_rs = ∂y_rs · W_s and sends it to r,
               which adds them up; ∂W_s = Σ_r ∂y_rsᵀ · x_r is complete on s

An embedding's rank gets all tokens, looks up those in its rows, and sends each rank what it asked
for; all ranks know from the tokens who sends how much. ∂W_s then needs no further transfer. A rank
may hold no rows. Rows are cut at dimension 0, so that each part is one range of the whole tensor.
Source: M. Shoeybi et al., "Megatron-LM", arXiv:1909.08053 (with equal parts).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch  # noqa: TID253 - only ranks import this
from torch import nn  # noqa: TID253
from torch.nn import functional  # noqa: TID253

from trainwright.estimator.precision import wide
from trainwright.tasks.train.exchange.group_exchange import Exchange
from trainwright.tasks.train.exchange.rank_group import RankGroup
from trainwright.tasks.train.layouts.cut_tensors import CutTensors
from trainwright.tasks.train.layouts.factors import (
    Dense,
    Factors,
    ProductPhase,
    forward_of,
    joined,
    multiply,
    rows_of,
    square,
    without_padding,
)
from trainwright.tasks.train.out_of_memory import joint_work


class Sharded(CutTensors):
    """Replaces a dense module's `forward`. From `cut` to `join`, its parameters are some rows."""

    def __init__(
        self,
        name: str,
        module: Dense,
        exchange: Exchange | RankGroup,
        before: CutTensors | None = None,
    ) -> None:
        """`before`: the same layer of another layout, whose rows the module has."""
        self.module = module
        bias: Any = getattr(module, "bias", None)
        weight: nn.Parameter = module.weight  # type: ignore[assignment]  # torch says Tensor
        parameters = {f"{name}.weight": weight} | ({} if bias is None else {f"{name}.bias": bias})
        super().__init__(name, parameters, exchange, before)
        self.computed: Callable[[str, ProductPhase, float], None] = lambda *_: None
        """called after a product: layer, phase, rows of all ranks · share of the weight's rows"""
        self.widens = False
        """whether numbers of half precision are sent in fp32: ranks have unlike half types"""
        self.part = 0
        """the number of the micro-batch"""
        self._kept: list[list[Factors]] = []
        """by call: the factors of each rank"""
        module.forward = self  # type: ignore[method-assign]

    @property
    def members(self) -> Sequence[int]:
        """The ranks that compute the layer."""
        return self._exchange.members

    @property
    def used(self) -> bool:
        """Whether the layer ran in this step."""
        return bool(self._kept)

    def release(self) -> None:
        """Give the module its own `forward` back. The rank holds all rows."""
        vars(self.module).pop("forward")

    def begin(self) -> None:
        """A step begins."""
        self._kept.clear()

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        if self.cuts is None:
            return forward_of(self.module, input)
        rows = rows_of(self.module, input)
        kind = rows.device.type
        if rows.is_floating_point() and torch.is_autocast_enabled(kind):
            rows = rows.to(torch.get_autocast_dtype(kind))  # as autocast does before the product
        with joint_work(self.name):
            found: torch.Tensor = _Divided.apply(*self._given(rows), self)  # type: ignore[no-untyped-call]
        if isinstance(self.module, nn.Conv2d):
            places = (input.shape[0], *input.shape[2:])
            return found.view(*places, found.shape[1]).movedim(-1, 1)
        if isinstance(self.module, nn.Embedding):
            return found.view(*input.shape, found.shape[1])
        return found.view(*input.shape[:-1], found.shape[1])

    def _given(self, rows: torch.Tensor) -> tuple[Any, ...]:
        # With the bias as an argument, the backward pass comes also if only the bias is trained.
        return rows, self.module.weight, getattr(self.module, "bias", None)

    def _note(self, phase: ProductPhase, inputs: Sequence[torch.Tensor]) -> None:
        """A product of these inputs and this rank's rows has been computed."""
        rows = sum(len(one) for one in inputs)
        self.computed(self.name, phase, rows * self.rows_held / self.total)

    def _named(self, what: str) -> str:
        return f"{what} {self.name} {self.part}"

    def gather(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """The inputs of all ranks."""
        # Detached: what is kept of the step must not keep its graph.
        came = self._exchange.gather([self._sent(rows.detach())], self._named("inputs"))
        return [one.to(rows.dtype) for (one,) in came]

    def _sent(self, one: torch.Tensor) -> torch.Tensor:
        """A tensor in the type in which it is sent."""
        return one.float() if self.widens and one.dtype in (torch.half, torch.bfloat16) else one

    def _exchanged(self, parts: Sequence[torch.Tensor], what: str) -> list[torch.Tensor]:
        """Send a part to each rank; what they send, in the type of the parts."""
        sent = [self._sent(one) for one in parts]
        return [one.to(parts[0].dtype) for one in self._exchange.exchange(sent, self._named(what))]

    def outputs(self, everyone: list[torch.Tensor]) -> torch.Tensor:
        """The outputs of this rank's samples, from the inputs of all."""
        weight, bias = self.module.weight, getattr(self.module, "bias", None)
        if isinstance(self.module, nn.Embedding):
            return self._looked_up(everyone)
        rows = torch.cat(everyone)
        product = functional.linear(rows, weight.flatten(1), bias)
        pieces = product.split([len(one) for one in everyone])
        self._note("forward", everyone)
        return torch.cat(self._exchanged(pieces, "outputs"), dim=1)

    def _looked_up(self, everyone: list[torch.Tensor]) -> torch.Tensor:
        """The table's rows of this rank's tokens."""
        weight, own = self.module.weight, everyone[self._exchange.rank]
        if any(
            len(one) and not 0 <= int(one.min()) <= int(one.max()) < self.total for one in everyone
        ):
            raise IndexError(f"index out of range: {self.name} has the rows 0 to {self.total - 1}")
        pieces = [
            weight[tokens[self._has(tokens, self._exchange.rank)] - self.own[0]]
            for tokens in everyone
        ]
        self._note("forward", everyone)
        came = self._exchanged(pieces, "outputs")
        found = weight.new_empty((len(own), weight.shape[1]))
        for rank, rows in enumerate(came):
            found[self._has(own, rank)] = rows
        return found

    def _has(self, tokens: torch.Tensor, rank: int) -> torch.Tensor:
        """Which tokens are in a rank's rows."""
        assert self.cuts is not None
        begin, end = self.cuts[rank]
        return (tokens >= begin) & (tokens < end)

    def input_gradient(
        self, everyone: list[torch.Tensor], gradient: torch.Tensor, *, wanted: bool
    ) -> torch.Tensor | None:
        """The inputs' gradient of this rank's samples; keeps the factors of this rank's rows."""
        own = self._exchange.rank
        if isinstance(self.module, nn.Embedding):
            pieces = [
                gradient[self._has(everyone[own], rank)] for rank in range(self._exchange.size)
            ]
            came = self._exchanged(pieces, "output gradients")
            self._kept.append(
                [
                    self._of_table(tokens[self._has(tokens, own)], rows)
                    for tokens, rows in zip(everyone, came, strict=True)
                ]
            )
            return None
        assert self.cuts is not None
        columns = [gradient[:, begin:end].contiguous() for begin, end in self.cuts]
        came = self._exchanged(columns, "output gradients")
        self._kept.append([Factors(*pair) for pair in zip(everyone, came, strict=True)])
        weight = self.module.weight
        # Every rank computes and sends, or none does: all run the same model.
        if not wanted:
            return None
        partial = torch.cat(came) @ weight.flatten(1).to(gradient.dtype)
        parts = [self._sent(one) for one in partial.split([len(one) for one in everyone])]
        self._note("input_gradient", everyone)
        found = self._exchange.scatter_sum(parts, self._named("input gradients"))
        return found.to(partial.dtype)

    def _of_table(self, tokens: torch.Tensor, gradients: torch.Tensor) -> Factors:
        """Factors of this rank's rows of a table, which it counts from 0."""
        kept = without_padding(self.module, Factors(tokens, gradients))
        return Factors(kept.inputs - self.own[0], kept.gradients)

    def finish(self, loss_scale: float) -> list[float]:
        """Set the gradients of this rank's rows. Returns |h_r|² of the samples of each member r."""
        if not self._kept:
            for parameter in self.parameters.values():
                parameter.grad = None
            return [0.0] * self._exchange.size
        exact = wide(self.module.weight.dtype)
        by_rank = []
        for rank in range(self._exchange.size):
            inputs, gradients = (
                one.detach() for one in joined([call[rank] for call in self._kept])
            )
            inputs = inputs.to(exact) if inputs.is_floating_point() else inputs
            by_rank.append(Factors(inputs, gradients.to(exact) / loss_scale))
        found = multiply(self.module, joined(by_rank))
        for parameter, gradient in zip(self.parameters.values(), found, strict=True):
            if parameter.requires_grad:
                parameter.grad = gradient.to(parameter.dtype)
        rows = sum(len(one.inputs) for one in by_rank)
        looked_up = isinstance(self.module, nn.Embedding)  # these are of this rank's rows already
        share = 1.0 if looked_up else self.rows_held / self.total
        self.computed(self.name, "weight_gradient", rows * share)
        return [square(self.module, one) for one in by_rank]


class _Divided(torch.autograd.Function):
    """A product whose weight's rows are on several ranks."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weight: torch.Tensor, bias: Any, owner: Sharded
    ) -> torch.Tensor:
        everyone = owner.gather(rows)
        ctx.everyone, ctx.owner = everyone, owner
        return owner.outputs(everyone)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        owner = ctx.owner
        with joint_work(owner.name):
            found = owner.input_gradient(
                ctx.everyone,
                gradients[0],
                wanted=ctx.needs_input_grad[0],
            )
        return found, None, None, None
