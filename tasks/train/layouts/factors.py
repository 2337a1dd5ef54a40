"""The weight gradient of a dense product as the product of two factors.

For rows x (R × inputs) and output gradients g (R × outputs), y = x · Wᵀ + b has

    ∂W = gᵀ · x        ∂b = Σ_r g_r

and an embedding of tokens t has ∂W[t_r] += g_r. Both are sums over rows, so rows of several ranks
give the gradient of the joint batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch  # noqa: TID253 - only ranks import this
from torch import nn  # noqa: TID253
from torch.nn import functional  # noqa: TID253

from trainwright.estimator.precision import wide

Dense = nn.Linear | nn.Conv2d | nn.Embedding
ProductPhase = Literal["forward", "input_gradient", "weight_gradient"]
"""The products of a layer in a step."""
PHASES: tuple[ProductPhase, ...] = get_args(ProductPhase)


class Factors(NamedTuple):
    """Rows of inputs (R × inputs; tokens: R) and of output gradients (R × outputs)."""

    inputs: torch.Tensor
    gradients: torch.Tensor


def rows_of(module: Dense, inputs: torch.Tensor) -> torch.Tensor:
    """A module's inputs as rows."""
    if isinstance(module, nn.Embedding):
        return inputs.reshape(-1)
    if isinstance(module, nn.Conv2d):  # N × channels × height × width
        return inputs.movedim(1, -1).reshape(-1, inputs.shape[1])
    return inputs.reshape(-1, inputs.shape[-1])


def gradient_rows(module: Dense, gradients: torch.Tensor) -> torch.Tensor:
    """Gradients of a module's outputs as rows."""
    if isinstance(module, nn.Conv2d):
        return gradients.movedim(1, -1).reshape(-1, gradients.shape[1])
    return gradients.reshape(-1, gradients.shape[-1])


def without_padding(module: Dense, factors: Factors) -> Factors:
    """The factors without tokens whose row of the table is never trained."""
    if not isinstance(module, nn.Embedding) or module.padding_idx is None:
        return factors
    kept = factors.inputs != module.padding_idx
    return Factors(factors.inputs[kept], factors.gradients[kept])


def multiply(module: Dense, factors: Factors) -> list[torch.Tensor]:
    """The gradients of the module's weight, and of its bias if it has one."""
    inputs, gradients = factors
    weight = module.weight
    if isinstance(module, nn.Embedding):
        found = torch.zeros_like(weight)
        return [found.index_add_(0, inputs, gradients.to(found.dtype))]
    product = (gradients.t() @ inputs).view(weight.shape)
    return [product] if module.bias is None else [product, gradients.sum(0)]


def square(module: Dense, factors: Factors) -> float:
    """|∂W|² + |∂b|² in the factors' precision, without computing ∂W where that costs less.

    |gᵀ x|² = Σ_rs (g_r · g_s) (x_r · x_s).
    """
    inputs, gradients = (
        one.to(wide(one.dtype)) if one.is_floating_point() else one for one in factors
    )
    if isinstance(module, nn.Embedding):
        tokens, places = torch.unique(inputs, return_inverse=True)
        sums = gradients.new_zeros(len(tokens), gradients.shape[1])
        return float(sums.index_add_(0, places, gradients).square().sum())
    rows, (width, height) = len(inputs), (inputs.shape[1], gradients.shape[1])
    if rows * (width + height) < width * height:
        weight = float(((gradients @ gradients.t()) * (inputs @ inputs.t())).sum())
    else:
        weight = float((gradients.t() @ inputs).square().sum())
    return weight + (float(gradients.sum(0).square().sum()) if module.bias is not None else 0.0)


def joined(parts: Sequence[Factors]) -> Factors:
    """The rows of several parts, one after another."""
    return Factors(
        torch.cat([one.inputs for one in parts]), torch.cat([one.gradients for one in parts])
    )


def forward_of(module: Dense, inputs: torch.Tensor) -> torch.Tensor:
    """What the module computes."""
    if isinstance(module, nn.Embedding):
        return functional.embedding(inputs, module.weight, module.padding_idx)
    if isinstance(module, nn.Conv2d):
        return functional.conv2d(inputs, module.weight, module.bias)
    return functional.linear(inputs, module.weight, module.bias)
