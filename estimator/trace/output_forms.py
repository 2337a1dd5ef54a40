"""Shapes and types of a model's outputs, whatever tree of tensors they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch  # noqa: TID253 - only code that runs models imports this
from torch.utils._pytree import tree_leaves, tree_map_only  # noqa: TID253


@dataclass(frozen=True)
class TensorForm:
    """A tensor of a model's outputs."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def forms_of(outputs: Any) -> Any:
    """The outputs with forms in the place of tensors."""
    return tree_map_only(torch.Tensor, lambda one: TensorForm(tuple(one.shape), one.dtype), outputs)


def of_a_sample(small: tuple[int, Any], large: tuple[int, Any]) -> Any:
    """The outputs' forms for a sample: rows of each, then other dimensions; 0 rows: of all."""
    (few, first), (many, second) = small, large
    others = iter(tree_leaves(second))

    def each(one: TensorForm) -> TensorForm:
        rows = one.shape[0] if one.shape else 0
        grows = rows and next(others).shape[:1] == (rows * many // few,) and rows % few == 0
        return TensorForm((rows // few, *one.shape[1:]) if grows else (0, *one.shape), one.dtype)

    return tree_map_only(TensorForm, each, first)
