"""Tensors on their way into a checkpoint and out of it: one rank's part of them, and their files."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch  # noqa: TID253 - only ranks import this

from trainwright.tasks.errors import TrainingFailed
from trainwright.tasks.train.checkpoint.shards import layout

Tensors = dict[str, torch.Tensor]
LEFT_FREE_BYTES = 1 << 30
"""What copies in files leave of the disk, for journals and logs."""
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


@dataclass
class _File:
    """A safetensors file in memory; `parts` are the tensors that lie in it."""

    whole: torch.Tensor
    parts: Tensors

    def fits(self, tensors: Tensors) -> bool:
        """Whether it was laid out for such tensors."""
        return self.parts.keys() == tensors.keys() and all(
            part.shape == tensors[name].shape and part.dtype == tensors[name].dtype
            for name, part in self.parts.items()
        )


class HostCopy:
    """Tensors copied into the host's memory, as the safetensors files that they are to be: what is copied once is hashed and
    written where it lies. The memory is used again by the next copy.

    With a `place`, that memory is files there, which outlive the process: all of them, or none where the disk has no room.
    """

    def __init__(self, place: Path | None = None) -> None:
        self.place, self._files = place, dict[str, _File]()
        self.lasts = False
        """whether all of it lies in files; not in memory that a GPU's driver pins"""

    def take(self, files: dict[str, Tensors]) -> dict[str, memoryview]:
        """The files, of the tensors as they are now, tied ones twice; valid until the next `take`.

        Raises TrainingFailed for a type that safetensors can't hold.
        """
        wanted = self.place is not None and not any(
            one.is_cuda for tensors in files.values() for one in tensors.values()
        )
        fits = self._files.keys() == files.keys() and all(
            self._files[name].fits(files[name]) for name in files
        )
        if fits and wanted and not self.lasts:  # what is in memory stays there until there is room
            fits = not _has_room(self.place, sum(one.whole.nbytes for one in self._files.values()))
        if not fits or (self.lasts and not wanted):
            self._lay_out(files, mapped=wanted)
        for name, tensors in files.items():
            for key, value in tensors.items():
                self._files[name].parts[key].copy_(value.detach(), non_blocking=value.is_cuda)
        if any(value.is_cuda for tensors in files.values() for value in tensors.values()):
            torch.cuda.synchronize()
        return {name: kept.whole.numpy().data for name, kept in self._files.items()}

    def _lay_out(self, files: dict[str, Tensors], *, mapped: bool) -> None:
        plans = {name: _plan(tensors) for name, tensors in files.items()}
        sizes = {name: len(beginning) + size for name, (beginning, _, size) in plans.items()}
        self._files, memory = {}, None
        if self.place is not None:
            shutil.rmtree(self.place, ignore_errors=True)
            memory = _mapped(self.place, sizes) if mapped else None
        self.lasts = memory is not None
        for name, tensors in files.items():
            beginning, places, _ = plans[name]
            on_gpu = any(value.is_cuda for value in tensors.values())
            whole = (
                memory[name]
                if memory
                else torch.empty(sizes[name], dtype=torch.uint8, pin_memory=on_gpu)
            )
            whole[: len(beginning)] = torch.frombuffer(bytearray(beginning), dtype=torch.uint8)
            parts = {}
            for key, value in tensors.items():
                part = whole[places[key] : places[key] + value.numel() * value.element_size()]
                parts[key] = part.view(value.dtype).view(value.shape)
            self._files[name] = _File(whole, parts)


def _plan(tensors: Tensors) -> tuple[bytes, dict[str, int], int]:
    """How the file begins, where each tensor lies in it, and the bytes of all tensors together."""
    for name, value in tensors.items():
        if value.dtype not in _DTYPES:
            raise TrainingFailed(
                f"checkpoint: {name} is of {value.dtype}, which safetensors can't hold", final=True
            )
    beginning, places = layout(
        (name, _DTYPES[value.dtype], list(value.shape), value.numel() * value.element_size())
        for name, value in tensors.items()
    )
    return beginning, places, size_bytes(tensors)


def _has_room(place: Path | None, size: int) -> bool:
    """Whether so many bytes may lie there, or where it is to be."""
    there = (
        next((one for one in (place, *place.parents) if one.exists()), None)
        if place is not None
        else None
    )
    return there is not None and shutil.disk_usage(there).free >= size + LEFT_FREE_BYTES


def _mapped(place: Path, sizes: dict[str, int]) -> dict[str, torch.Tensor] | None:
    """Memory of these sizes in files of these names; None where the disk has no room for all, or can't map them."""
    try:
        place.mkdir(parents=True)
        if not _has_room(place, sum(sizes.values())):
            return None
        found = {}
        for name, size in sizes.items():
            with (place / name).open("xb") as made:
                os.posix_fallocate(
                    made.fileno(), 0, size
                )  # a disk that is full later would end the process
            found[name] = torch.from_file(
                str(place / name), shared=True, size=size, dtype=torch.uint8
            )
    except (OSError, RuntimeError):
        shutil.rmtree(place, ignore_errors=True)
        return None
    return found
