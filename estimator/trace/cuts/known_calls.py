"""What is known of functions and modules of torch when a forward pass is recorded. Loads torch."""

from __future__ import annotations

import enum
import numbers
import types
from typing import Any

import torch  # noqa: TID253 - recording runs in a separate process
from torch import nn  # noqa: TID253
from torch._subclasses.fake_tensor import FakeTensor  # noqa: TID253

ATTENTION = "scaled_dot_product_attention"
DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", ATTENTION)
"""The functions of `torch.nn.functional` whose masks ranks key by the number of the call."""
BATCH_NORM = nn.modules.batchnorm._BatchNorm
NORMS = (BATCH_NORM, nn.modules.instancenorm._InstanceNorm)
"""Modules that may update running statistics."""
_OPENED = (
    nn.Sequential,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.TransformerDecoderLayer,
)
"""Modules of torch whose code is opened. Others may choose other kernels when they evaluate."""
_FUSED = (nn.TransformerEncoderLayer, nn.MultiheadAttention)
"""They use fused kernels in evaluation, unless a recorder looks on."""
PLAIN = (
    *(numbers.Number, str, bytes, type(None), type(...), enum.Enum, type),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
"""Types of values that a recorded call may have among its arguments, beside tensors."""
SIZES = frozenset(("shape", "size", "__len__", "numel", "nelement", "nbytes", "stride"))
_NO_VALUES = """
    __hash__ __repr__ __str__ __format__ dim ndimension storage_offset element_size
    is_contiguous is_floating_point is_complex is_signed is_conj is_neg is_inference
    is_same_size get_device is_pinned type has_names _is_view result_type is_shared
    broadcast_shapes promote_types is_distributed untyped_storage _version device dtype layout
    ndim requires_grad is_leaf grad_fn is_cuda is_cpu is_sparse is_quantized is_meta is_nested
    itemsize names grad is_mkldnn is_mps is_xla is_xpu is_ipu is_maia is_mtia is_sparse_csr
    retains_grad
"""
QUERIES = SIZES | frozenset(_NO_VALUES.split())
"""Functions that tell of a tensor what does not depend on its values."""
OF_GRADIENTS = ("grad", "backward")
"""Functions that compute gradients amid a forward pass."""
_OF_CONSTANTS = """
    arange zeros ones full linspace logspace eye tensor triu tril zeros_like ones_like full_like
    new_zeros new_ones new_full to float bool eq ne lt gt le ge view reshape __getitem__ all any
    transpose unsqueeze fill_ masked_fill expand detach logical_not logical_and logical_or
    __invert__ bitwise_not
"""
CONSTANT = frozenset(_OF_CONSTANTS.split())
"""Functions that make of constants a constant."""
_VARYING = (
    *("nonzero", "masked_select", "unique", "unique_consecutive", "argwhere", "bincount"),
    "_pack_padded_sequence",
)


def name_of(func: Any) -> str:
    """A function's name; of a property of tensors, the property's."""
    name = getattr(func, "__name__", type(func).__name__)
    return getattr(func.__self__, "__name__", name) if name == "__get__" else name


def replaced_by(func: Any) -> str | None:
    """The name of a dropout, in whatever way it was called; None: it is none."""
    if func is torch._C._nn.scaled_dot_product_attention:
        return ATTENTION
    return getattr(func, "replaces", None)


def argument(args: Any, kwargs: Any, place: int, name: str, default: Any) -> Any:
    """An argument that was given by place or by name."""
    return args[place] if len(args) > place else kwargs.get(name, default)


def draws_mask(name: str, args: Any, kwargs: Any) -> bool:
    """Whether a call of a dropout gets a number (`tasks.train.passes.keyed_dropout`)."""
    if name == ATTENTION:
        return 0 < float(argument(args, kwargs, 4, "dropout_p", 0.0)) < 1
    training = argument(args, kwargs, 2, "training", name != "alpha_dropout")
    return bool(training) and 0 < float(argument(args, kwargs, 1, "p", 0.5)) < 1


def of_batch(name: str, args: Any, kwargs: Any) -> bool:
    """Whether a function normalises by statistics of the batch."""
    return name == "batch_norm" and bool(argument(args, kwargs, 5, "training", False))


def varies(name: str, args: Any, kwargs: Any) -> bool:
    """Whether the shape of a function's result depends on the values of its arguments."""
    if name == "__getitem__":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        types_ = (torch.bool, torch.uint8)
        return any(isinstance(one, torch.Tensor) and one.dtype in types_ for one in index)
    if name == "where":
        return len(args) + len(kwargs) == 1
    if name == "repeat_interleave":
        by_tensor = len(args) < 2 or isinstance(args[1], torch.Tensor)
        return by_tensor and kwargs.get("output_size") is None
    return name in _VARYING


def is_slow_fake(name: str, args: Any) -> bool:
    """Whether a function is a recurrent layer, of which fake tensors run every operation."""
    recurrent = name in ("gru", "lstm", "rnn_tanh", "rnn_relu")
    return recurrent and len(args) == 9 and isinstance(args[0], FakeTensor)


def one_time(func: Any, args: Any) -> Any:
    """The result of a recurrent layer over fake tensors, computed for one time and repeated."""
    inputs, batch_first = args[0], args[8]
    time = 1 if batch_first else 0
    found, *last = func(inputs.narrow(time, 0, 1), *args[1:])
    found = found.transpose(0, time).expand(inputs.shape[time], -1, -1).contiguous()
    return (found.transpose(0, time), *last)


def is_plain_function(value: Any) -> bool:
    """Whether a function holds nothing of the model."""
    if isinstance(value, types.BuiltinFunctionType):
        return True
    return isinstance(value, types.FunctionType) and not value.__closure__


def runs_whole(module: nn.Module, args: Any, kwargs: Any) -> bool:
    """Whether a module is run as one call, whatever its code does."""
    if has_hooks(module) or not any(True for _ in module.children()):
        return True
    if isinstance(module, _FUSED):
        return True
    if isinstance(module, nn.TransformerEncoder):
        # It evaluates padded sequences as nested tensors.
        return argument(args, kwargs, 2, "src_key_padding_mask", None) is not None
    return type(module).__module__.startswith("torch.") and not isinstance(module, _OPENED)


def has_hooks(module: nn.Module) -> bool:
    """Whether something of a user's runs before or after the module."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, one, None) for one in kinds)


def attributes_of(model: nn.Module) -> dict[int, str]:
    """The path of each tensor that a module of the model holds, by id."""
    found: dict[int, str] = {}
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        held = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        held += [(key, one) for key, one in vars(module).items() if isinstance(one, torch.Tensor)]
        for key, one in held:
            found.setdefault(id(one), prefix + key)
    return found


def described_module(model: nn.Module, name: str) -> str:
    """A module for people, as in `encoder (Encoder)`."""
    kind = type(model.get_submodule(name)).__name__
    return f"{name} ({kind})" if name else kind
