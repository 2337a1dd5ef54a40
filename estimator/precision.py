"""The meaning of each precision, for tracing, measuring and training. Loads torch.

    fp32, fp64   parameters and arithmetic
    bf16         parameters and arithmetic; batch normalisation, with its statistics, stays in fp32
                 (see `cast`)
    amp          parameters in fp32, arithmetic in half precision as autocast decides: bf16, or fp16
                 on devices without bf16

The loss is computed from outputs in fp32 or wider: with the 8 bits of bf16, the mean over a batch
and a rank's share of it would have two digits.
"""

from __future__ import annotations

from typing import Any

import torch  # noqa: TID253 - code that runs steps is in a separate process
from torch.utils._pytree import tree_map  # noqa: TID253

PARAMETER_DTYPES = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "bf16": torch.bfloat16,
    "amp": torch.float32,
}
_HALVES = (torch.bfloat16, torch.float16)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which numbers of this type are summed: fp32 for half precision, else the same."""
    return torch.float32 if dtype in _HALVES else dtype


def for_loss(outputs: Any) -> Any:
    """A model's outputs, however nested, with half precision converted to fp32."""
    return tree_map(
        lambda one: one.to(wide(one.dtype)) if isinstance(one, torch.Tensor) else one, outputs
    )


def autocast(
    precision: str, device: str = "cpu", *, half: torch.dtype = torch.bfloat16
) -> torch.autocast:
    """The context of a forward pass and its loss. It has an effect only with `amp`.

    `device` is "cpu" or "cuda".
    """
    return torch.autocast(device, dtype=half, enabled=precision == "amp")


def cast(model: torch.nn.Module, precision: str) -> torch.nn.Module:
    """Convert parameters and buffers in place; complex ones (rotary positions) stay complex.

    In bf16, a running mean that takes a tenth of each batch's mean would stop moving once both
    differ by less than 4 %.
    """
    dtype = PARAMETER_DTYPES[precision]
    # Not `dtype.to_complex()`: for bf16, torch 2.14 and later have a type that few operations
    # support.
    complex_ = torch.complex128 if dtype == torch.float64 else torch.complex64
    model._apply(
        lambda one: one.to(complex_ if one.is_complex() else dtype) if _is_inexact(one) else one
    )
    if precision == "bf16":
        for module in model.modules():
            if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
                module.float()
    return model


def _is_inexact(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
