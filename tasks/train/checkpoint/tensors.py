"""Tensors on their way into a checkpoint and out of it: a rank's part of them, as files."""

from __future__ import annotations

import re
from typing import Any

import torch  # noqa: TID253 - only ranks import this

from trainwright.tasks.errors import TrainingFailed
from trainwright.tasks.storage.objects import Content
from trainwright.tasks.train.checkpoint.shards import layout

Tensors = dict[str, torch.Tensor]
SHARDED_ABOVE_BYTES = 64 << 20
"""Of all tensors together; below, one rank writes all of them."""
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
    """The optimizer's state: `exp_avg.3` is of the fourth parameter. Its own tensors, no copies."""
    return {
        f"{name}.{number}": torch.as_tensor(value)
        for number, values in optimizer.state_dict()["state"].items()
        for name, value in values.items()
        if value is not None
    }


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: Tensors) -> None:
    """Put `optimizer_tensors` back. Raises TrainingFailed if they are of other parameters."""
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
    """The sum of the tensors' sizes: tied ones count as often as they are named."""
    return sum(value.numel() * value.element_size() for value in tensors.values())


def own_part(files: dict[str, Tensors], rank: int, size: int) -> dict[str, Tensors]:
    """A rank's share of the tensors of several files, by file.

    All tensors in one row are cut into `size` stretches of about as many bytes; a tensor belongs to
    the stretch that its middle lies in.
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
    """model-00002-of-00003.safetensors; of a whole (`size` 1), the name of the file itself."""
    return file if size == 1 else file.replace(".", f"-{rank + 1:05d}-of-{size:05d}.")


def host_copies(tensors: Tensors) -> Tensors:
    """Copies in this process's memory, which stay as they are while training goes on.

    A GPU's driver copies faster to memory that it has pinned; torch keeps that for the next time.
    """
    copies = {}
    for name, value in tensors.items():
        copy = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
        copies[name] = copy.copy_(value.detach(), non_blocking=value.is_cuda)
    if any(value.is_cuda for value in tensors.values()):
        torch.cuda.synchronize()
    return copies


def as_file(tensors: Tensors) -> list[Content]:
    """The safetensors file of tensors in this process's memory, in pieces, which are not copies.

    Raises TrainingFailed for a type that safetensors can't hold.
    """
    for name, value in tensors.items():
        if value.dtype not in _DTYPES:
            raise TrainingFailed(
                f"checkpoint: {name} is of {value.dtype}, which safetensors can't hold", final=True
            )
    beginning, places = layout(
        (name, _DTYPES[value.dtype], list(value.shape), value.numel() * value.element_size())
        for name, value in tensors.items()
    )
    flat = (tensors[name].detach().contiguous().reshape(-1) for name in places)
    return [beginning, *(one.view(torch.uint8).numpy().data for one in flat if one.numel())]
