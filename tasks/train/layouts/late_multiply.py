"""Late multiply: ranks gather the factors of a dense layer's weight gradient, and multiply them.

Summed gradients send outputs · inputs numbers; the factors of a rank's rows are R · (outputs +
inputs). Output gradients carry the rank's weight w_r / B already, so uneven batches stay exact.
Source: P. Xie et al., "Lighter-communication distributed machine learning via sufficient factor
broadcasting", UAI 2016; H. Zhang et al., "Poseidon", USENIX ATC 2017.

The gather of a layer starts as soon as its backward pass has ended, and goes on beside that of
earlier layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch  # noqa: TID253 - only ranks import this
from torch.nn import functional  # noqa: TID253

from trainwright.estimator.precision import wide
from trainwright.tasks.train.exchange.group_exchange import Exchange, Started
from trainwright.tasks.train.exchange.rank_group import RankGroup
from trainwright.tasks.train.layouts.factors import (
    Dense,
    Factors,
    forward_of,
    gradient_rows,
    joined,
    multiply,
    rows_of,
    square,
    without_padding,
)


class LateMultiplied:
    """Replaces the `forward` of a dense module, which then makes no weight gradient.

    Its parameters and names stay.
    """

    def __init__(
        self, name: str, module: Dense, exchange: Exchange | RankGroup, made: Callable[[], None]
    ) -> None:
        """`exchange`: the ranks that hold the layer.

        `made` is called when a backward pass has made all factors of the layer.
        """
        self.exchange = exchange
        self.name, self.module, self._made_all = name, module, made
        self.parameters = [module.weight, *([] if _bias(module) is None else [_bias(module)])]
        self._kept: list[Factors] = []
        self._open = 0
        """calls of the forward pass whose backward pass has not come yet"""
        module.forward = self  # type: ignore[method-assign]

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return forward_of(self.module, input)
        self._open += 1
        outputs: torch.Tensor = _Keep.apply(input, self.module.weight, _bias(self.module), self)  # type: ignore[no-untyped-call]
        return outputs

    def release(self) -> None:
        """Give the module its own `forward` back."""
        vars(self.module).pop("forward")

    def begin(self) -> None:
        """A step begins."""
        self._kept.clear()
        self._open = 0

    @property
    def used(self) -> bool:
        """Whether this rank has rows of the layer in this step."""
        return any(len(one.inputs) for one in self._kept)

    @property
    def complete(self) -> bool:
        """Whether the backward pass of every call so far has come."""
        return self._open == 0 and bool(self._kept)

    def keep(self, inputs: torch.Tensor, gradients: torch.Tensor) -> None:
        """Add the rows of one call."""
        rows = Factors(rows_of(self.module, inputs), gradient_rows(self.module, gradients))
        self._kept.append(without_padding(self.module, rows))
        self._open -= 1
        if self.complete:
            self._made_all()

    def own(self, loss_scale: float, dtype: torch.dtype | None) -> Factors:
        """This rank's rows of the step, as they are sent: in `dtype`, None for the parameters'."""
        module, kept = self.module, self._kept
        exact = wide(module.weight.dtype)
        if kept:
            rows = joined(kept)
        else:  # the step did not use the layer
            width = module.weight.shape[1]
            tokens = isinstance(module, torch.nn.Embedding)
            device = module.weight.device
            outputs = width if tokens else module.weight.shape[0]
            rows = Factors(
                torch.empty(0, dtype=torch.int64, device=device)
                if tokens
                else torch.empty(0, width, device=device),
                torch.empty(0, outputs, device=device),
            )
        gradients = rows.gradients.to(exact)
        if loss_scale != 1:
            gradients = gradients / loss_scale
        return Factors(_as(rows.inputs, dtype or exact), _as(gradients, dtype or exact))

    def gather(self, own: Factors) -> Started[list[list[torch.Tensor]]]:
        """Begin to gather the rows of all ranks."""
        # In an order of their own: ranks may have unlike gradients to sum between them.
        return self.exchange.start_gather(own, f"factors {self.name}", order="gathers")

    def square(self, own: Factors) -> float:
        """|h|² of these rows' weight gradient."""
        return square(self.module, own)

    def finish(self, parts: list[Factors], factor: float = 1.0) -> float:
        """Set the gradients, times `factor`, from the rows of all ranks, in their order.

        Returns |g|². Without any rows, the gradients are None.
        """
        exact, whole = wide(self.module.weight.dtype), joined(parts)
        if not len(whole.inputs):
            for parameter in self.parameters:
                parameter.grad = None
            return 0.0
        factors = Factors(_as(whole.inputs, exact), whole.gradients.to(exact))
        found = multiply(self.module, factors)
        total = 0.0
        for parameter, gradient in zip(self.parameters, found, strict=True):
            if not parameter.requires_grad:
                continue
            if factor != 1:
                gradient = gradient * factor
            parameter.grad = gradient.to(parameter.dtype)
            total += float(torch.dot(gradient.reshape(-1), gradient.reshape(-1)))
        return total


class _Keep(torch.autograd.Function):
    """The module's product. Its backward pass makes the inputs' gradient, and keeps the factors."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: Any, owner: LateMultiplied
    ) -> torch.Tensor:
        # With the bias as an argument, the backward pass comes also if only the bias is trained.
        outputs = forward_of(owner.module, inputs)
        ctx.save_for_backward(inputs, weight)
        ctx.owner = owner
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        owner, gradient = ctx.owner, gradients[0]
        owner.keep(inputs.detach(), gradient)  # without the graph that made them
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        if weight.dim() == 4:  # a convolution of 1 × 1
            found = functional.conv_transpose2d(gradient, weight.to(gradient.dtype))
        else:
            found = gradient @ weight.to(gradient.dtype)
        return found.to(inputs.dtype), None, None, None


def _bias(module: Dense) -> Any:
    return getattr(module, "bias", None)


def _as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In another type; tokens stay integers."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
