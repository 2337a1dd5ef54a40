"""Which tensors of a model can be trained, summed over ranks and stored."""

from __future__ import annotations

import torch  # noqa: TID253 - this is a separate process

from trainwright.estimator.errors import BadInput

_TRAINED = ("float32", "float64", "float16", "bfloat16")
"""the types of parameters that optimizers and sums know"""


def require_trainable(model: torch.nn.Module) -> None:
    """Raise BadInput for a parameter or buffer that can't be trained, summed or stored."""
    for name, tensor in model.named_parameters():
        if tensor.is_complex() and tensor.requires_grad:
            raise BadInput(
                f"model: the parameter {name} is {_dtype(tensor)}, but gradients can only be "
                "summed as real numbers; store its real and imaginary parts, and join them by "
                "torch.view_as_complex"
            )
        if tensor.requires_grad and _dtype(tensor) not in _TRAINED:
            raise BadInput(
                f"model: the parameter {name} is {_dtype(tensor)}; allowed: "
                f"{', '.join(_TRAINED)}, or requires_grad=False"
            )
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, torch.Tensor):
            continue
        quantised = _dtype(tensor).startswith(("qint", "quint"))
        if quantised or tensor.layout != torch.strided:
            kind = "quantised" if quantised else f"of layout {str(tensor.layout)[6:]}"
            raise BadInput(
                f"model: {name} is {kind} ({_dtype(tensor)}), which can't be trained and stored; "
                "allowed: dense tensors (an export to onnx-int8 quantises them)"
            )


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
