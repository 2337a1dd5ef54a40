"""Backward passes that leave out the weight gradients of dense layers and convolutions.

The stage before waits for the gradients of inputs only. So with the schedule
zero-bubble a backward pass makes those first; `DeferredWeights.finish` makes the weight gradients
of a micro-batch later. Parameters that the rest of a stage uses too, or in other ways than by the
module's own product, are left to autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch  # noqa: TID253 - only ranks import this
from torch import nn  # noqa: TID253
from torch.nn import functional  # noqa: TID253

from trainwright.tasks.allocate.actions.schedules import DEFERRED_KINDS

_KINDS = tuple(getattr(nn, kind) for kind in DEFERRED_KINDS)
_MOST_SHARE = 1.5
"""An output's gradient that is a part of a tensor this much larger is copied."""
DeferredModule = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d


class DeferredWeights:
    """The weight gradients of a stage that are made after the backward pass.

    `arrived` is called with each parameter that has its gradient of a micro-batch.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], arrived: Callable[[nn.Parameter], None]
    ) -> None:
        """`modules`: those that the stage runs, by name."""
        self._arrived = arrived
        self.micro_batch = 0
        """the one whose forward pass runs"""
        self._kept: dict[int, list[tuple[DeferredModule, torch.Tensor, torch.Tensor]]] = {}
        users: dict[int, int] = {}
        for module in modules.values():
            for parameter in module.parameters(recurse=False):
                users[id(parameter)] = users.get(id(parameter), 0) + 1
        waiting = {
            name: module
            for name, module in modules.items()
            if _can_wait(module)
            and all(users[id(one)] == 1 for one in module.parameters(recurse=False))
        }
        self.names, self.modules = list(waiting), list(waiting.values())
        for module in self.modules:
            module.forward = _Forward(module, self)

    def release(self) -> None:
        """Give the modules their own `forward` back."""
        for module in self.modules:
            del module.forward
        self.modules = []

    def begin(self) -> None:
        """A step begins."""
        self._kept.clear()

    def keep(
        self, number: int, module: DeferredModule, inputs: torch.Tensor, gradient: torch.Tensor
    ) -> None:
        """Note a product of a micro-batch."""
        if gradient.untyped_storage().nbytes() > _MOST_SHARE * gradient.nbytes:
            gradient = gradient.clone()  # a part of a joined tensor would keep all of it
        self._kept.setdefault(number, []).append((module, inputs, gradient))

    @torch.no_grad()
    def finish(self, number: int) -> None:
        """Add the weight gradients of a micro-batch, the last layer first."""
        found: dict[int, tuple[nn.Parameter, torch.Tensor]] = {}
        for module, inputs, gradient in self._kept.pop(number, []):
            for parameter, own in _weight_gradients(module, inputs, gradient):
                before = found.get(id(parameter))
                found[id(parameter)] = parameter, own if before is None else before[1] + own
        for parameter, own in found.values():
            own = own.to(parameter.dtype)
            parameter.grad = own if parameter.grad is None else parameter.grad.add_(own)
            self._arrived(parameter)


class _Forward:
    """Replaces a module's `forward`."""

    def __init__(self, module: Any, owner: DeferredWeights) -> None:
        self._module, self._owner = module, owner

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        module = self._module
        if not torch.is_grad_enabled() or not module.weight.requires_grad:
            return _product(module, input)
        found: torch.Tensor = _Product.apply(  # type: ignore[no-untyped-call]
            input, module.weight, module.bias, module, self._owner, self._owner.micro_batch
        )
        return found


class _Product(torch.autograd.Function):
    """A module's product. Its backward pass makes the inputs' gradient, and keeps the rest."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        _: Any,
        module: DeferredModule,
        owner: DeferredWeights,
        number: int,
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.module, ctx.owner, ctx.number = module, owner, number
        return _product(module, inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        gradient = gradients[0]
        ctx.owner.keep(ctx.number, ctx.module, inputs, gradient)
        found = None
        if ctx.needs_input_grad[0]:
            found = _input_gradient(ctx.module, inputs, weight, gradient).to(inputs.dtype)
        return found, None, None, None, None, None


def _can_wait(module: nn.Module) -> bool:
    """Whether a module is a product that can be made here; its own `forward` may be replaced."""
    # Older forms of weight_norm, spectral_norm and pruning make the weight of other parameters.
    owned = [module._parameters.get(one) for one in ("weight", "bias")]
    products = [getattr(module, one, None) for one in ("weight", "bias")]
    if "forward" in vars(module) or any(a is not b for a, b in zip(owned, products, strict=True)):
        return False
    if type(module) is nn.Linear:
        return True
    plain = type(module) in _KINDS and getattr(module, "padding_mode", "") == "zeros"
    return plain and not isinstance(module.padding, str)


def _product(module: DeferredModule, inputs: torch.Tensor) -> torch.Tensor:
    if isinstance(module, nn.Linear):
        return functional.linear(inputs, module.weight, module.bias)
    found: torch.Tensor = module._conv_forward(inputs, module.weight, module.bias)
    return found


def _input_gradient(
    module: DeferredModule, inputs: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor
) -> torch.Tensor:
    weight = weight.to(gradient.dtype)
    if isinstance(module, nn.Linear):
        return gradient @ weight
    return _convolution_backward(module, inputs, weight, gradient, (True, False, False))[0]


def _weight_gradients(
    module: DeferredModule, inputs: torch.Tensor, gradient: torch.Tensor
) -> list[tuple[nn.Parameter, torch.Tensor]]:
    weight: Any = module.weight
    bias: Any = module.bias
    if isinstance(module, nn.Linear):
        rows = gradient.reshape(-1, gradient.shape[-1])
        found = [(weight, rows.t() @ inputs.reshape(-1, inputs.shape[-1]).to(rows.dtype))]
        if bias is not None:
            found.append((bias, rows.sum(0)))
    else:
        _, own, own_bias = _convolution_backward(
            module, inputs, weight, gradient, (False, True, bias is not None)
        )
        found = [(weight, own), *([] if bias is None else [(bias, own_bias)])]
    return [(parameter, one) for parameter, one in found if parameter.requires_grad]


def _convolution_backward(
    module: Any,
    inputs: torch.Tensor,
    weight: torch.Tensor,
    gradient: torch.Tensor,
    wanted: tuple[bool, bool, bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """torch's own backward pass of a convolution, for some of its gradients."""
    batched = inputs.dim() == weight.dim()
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = (
        torch.ops.aten.convolution_backward.default(
            gradient if batched else gradient.unsqueeze(0),
            (inputs if batched else inputs.unsqueeze(0)).to(gradient.dtype),
            weight.to(gradient.dtype),
            None if module.bias is None else [module.bias.numel()],
            list(module.stride),
            list(module.padding),
            list(module.dilation),
            False,
            [0] * len(module.stride),
            module.groups,
            list(wanted),
        )
    )
    inputs_gradient = found[0] if batched or found[0] is None else found[0].squeeze(0)
    return inputs_gradient, found[1], found[2]
