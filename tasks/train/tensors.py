"""Tensors on their way into a checkpoint and out of it: host copies, one rank's part of them, their bytes."""

from __future__ import annotations

import re
from typing import Any

import torch  # noqa: TID253 - only ranks import this

from trainwright.tasks.errors import TrainingFailed
from trainwright.tasks.train.shards import Piece, assemble

Tensors = dict[str, torch.Tensor]
_STATE_KEY = re.compile(r"^([A-Za-z_]\w*)\.(\d{1,9})$")
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
}  # fmt: skip


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Tensors:
    """The optimizer's state: `exp_avg.3` is of the fourth parameter. The tensors themselves, where it holds tensors."""
    return {
        f"{name}.{number}": torch.as_tensor(value)
        for number, values in optimizer.state_dict()["state"].items()
        for name, value in values.items()
        if value is not None
    }


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: Tensors) -> None:
    """Put `optimizer_tensors` back. Raises TrainingFailed where they are of other parameters."""
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    state: dict[int, dict[str, Any]] = {}
    for key, value in tensors.items():
        match = _STATE_KEY.match(key)
        number = int(match[2]) if match else len(parameters)
        if match is None or number >= len(parameters) or value.shape not in ((), parameters[number].shape):
            raise TrainingFailed(f"the checkpoint does not fit the optimizer: {key!r} of shape {tuple(value.shape)}")
        state.setdefault(number, {})[match[1]] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def size_bytes(tensors: Tensors) -> int:
    """What the tensors take, each for itself: tied ones count as often as they are named."""
    return sum(value.numel() * value.element_size() for value in tensors.values())


def own_part(files: dict[str, Tensors], rank: int, size: int) -> dict[str, Tensors]:
    """A rank's share of the tensors of several files, by file.

    All of them in one row, cut into `size` stretches of about as many bytes: a tensor belongs to the stretch its middle lies in.
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


class HostCopy:
    """Tensors copied into the host's memory; the memory is used again by the next copy."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], torch.Tensor] = {}

    def take(self, files: dict[str, Tensors]) -> dict[str, Tensors]:
        """The tensors as they are now. Each has memory of its own, tied ones too; valid until the next `take`."""
        before, self._kept = self._kept, {}
        for file, tensors in files.items():
            for name, value in tensors.items():
                old = before.get((file, name))
                if old is None or old.shape != value.shape or old.dtype != value.dtype:
                    old = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
                self._kept[file, name] = old.copy_(value.detach(), non_blocking=value.is_cuda)
        if any(value.is_cuda for tensors in files.values() for value in tensors.values()):
            torch.cuda.synchronize()
        return {file: {name: self._kept[file, name] for name in tensors} for file, tensors in files.items()}


def encode(tensors: Tensors) -> bytes:
    """Contiguous host tensors as a safetensors file. Raises TrainingFailed for a type that it can't hold."""
    pieces = list[Piece]()
    for name, value in tensors.items():
        if value.dtype not in _DTYPES:
            raise TrainingFailed(f"checkpoint: {name} is of {value.dtype}, which safetensors can't hold")
        content = value.reshape(-1).view(torch.uint8).numpy().data if value.numel() else b""
        pieces.append((name, _DTYPES[value.dtype], list(value.shape), content))
    return assemble(pieces)
