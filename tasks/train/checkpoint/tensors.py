"""Converts a rank's tensors to checkpoint files and back."""

from __future__ import annotations

import re
from typing import Any

import torch  # noqa: TID253 - only ranks import this

from trainwright.tasks.errors import TrainingFailed
from trainwright.tasks.storage.objects import Content
from trainwright.tasks.train.checkpoint.shards import layout

Tensors = dict[str, torch.Tensor]
_STATE_KEY = re.compile(r"^([A-Za-z_]\w*)\.(\d{1,9})$")
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Tensors:
    """The optimizer's state, without copies: `exp_avg.3` belongs to its fourth parameter."""
    return {
        f"{name}.{number}": torch.as_tensor(value)
        for number, values in optimizer.state_dict()["state"].items()
        for name, value in values.items()
        if value is not None
    }


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: Tensors) -> None:
    """Load `optimizer_tensors`. Raises TrainingFailed if they don't fit the parameters."""
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    state: dict[int, dict[str, Any]] = {}
    for key, value in tensors.items():
        match = _STATE_KEY.match(key)
        number = int(match[2]) if match else len(parameters)
        if (
            match is None
            or number >= len(parameters)
            or value.shape not in ((), parameters[number].shape)
        ):
            raise TrainingFailed(
                f"the checkpoint does not fit the optimizer: {key!r} of shape {tuple(value.shape)}"
            )
        state.setdefault(number, {})[match[1]] = value
    optimizer.load_state_dict(
        {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
    )


def size_bytes(tensors: Tensors) -> int:
    """The total size. Tied tensors count once for each name."""
    return sum(value.numel() * value.element_size() for value in tensors.values())


def own_part(files: dict[str, Tensors], rank: int, size: int) -> dict[str, Tensors]:
    """A rank's share of the tensors of several files, by file.

    The concatenated tensors are divided into `size` ranges of equal length in bytes. A tensor
    belongs to the range that contains its middle.
    """
    total, at = sum(size_bytes(tensors) for tensors in files.values()), 0
    own: dict[str, Tensors] = {}
    for file, tensors in files.items():
        for name, value in tensors.items():
            taken = value.numel() * value.element_size()
            if min(size - 1, (2 * at + taken) * size // max(1, 2 * total)) == rank:
                own.setdefault(file, {})[name] = value
            at += taken
    return own


def shard_name(file: str, rank: int, size: int) -> str:
    """For example model-00002-of-00003.safetensors; with `size` 1, the file name itself."""
    return file if size == 1 else file.replace(".", f"-{rank + 1:05d}-of-{size:05d}.")


def host_copies(tensors: Tensors) -> Tensors:
    """Copies in host memory, which training does not change.

    GPUs copy faster to pinned memory, and torch caches it for the next checkpoint.
    """
    copies = {}
    for name, value in tensors.items():
        copy = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
        copies[name] = copy.copy_(value.detach(), non_blocking=value.is_cuda)
    if any(value.is_cuda for value in tensors.values()):
        torch.cuda.synchronize()
    return copies


def as_file(tensors: Tensors) -> list[Content]:
    """The safetensors file of tensors in host memory, as pieces without copies.

    Raises TrainingFailed for a type that safetensors does not support.
    """
    for name, value in tensors.items():
        if value.dtype not in _DTYPES:
            raise TrainingFailed(
                f"checkpoint: {name} has the type {value.dtype}, which safetensors can't store",
                final=True,
            )
    beginning, places = layout(
        (name, _DTYPES[value.dtype], list(value.shape), value.numel() * value.element_size())
        for name, value in tensors.items()
    )
    flat = (tensors[name].detach().contiguous().reshape(-1) for name in places)
    return [beginning, *(one.view(torch.uint8).numpy().data for one in flat if one.numel())]
