"""Recognises modules that are one product of their inputs with a weight. Loads torch."""

from __future__ import annotations

from typing import Literal

import torch  # noqa: TID253 - tracing runs in a separate process
from torch import nn  # noqa: TID253

ProductKind = Literal["linear", "pointwise", "embedding"]


def dense_product(
    module: nn.Module, output: torch.Tensor
) -> tuple[ProductKind, int, int, int] | None:
    """Kind, rows, inputs and outputs of the product that a module is; None if it is another.

    A subclass or a changed `forward` may compute something else, and so is none.
    """
    if "forward" in vars(module):
        return None
    if type(module) is nn.Linear:
        rows = output.numel() // max(1, module.out_features)
        return "linear", rows, module.in_features, module.out_features
    if type(module) is nn.Conv2d and _is_pointwise(module):
        rows = output.numel() // max(1, module.out_channels)
        return "pointwise", rows, module.in_channels, module.out_channels
    if type(module) is nn.Embedding and module.max_norm is None and not module.scale_grad_by_freq:
        rows = output.numel() // max(1, module.embedding_dim)
        return "embedding", rows, module.num_embeddings, module.embedding_dim
    return None


def _is_pointwise(module: nn.Conv2d) -> bool:
    return (
        module.kernel_size == (1, 1)
        and module.stride == (1, 1)
        and module.padding in ((0, 0), "valid")
        and module.groups == 1
    )
