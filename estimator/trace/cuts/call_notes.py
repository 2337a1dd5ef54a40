"""What a recorder notes of a call, and the states that it compares. Loads torch."""

from __future__ import annotations

import contextlib
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch  # noqa: TID253 - recording runs in a separate process

_QUIET = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]), contextlib.__file__)


@dataclass
class CallNotes:
    """What is noted of a call while it runs. `given`: the ids of the tensors of its arguments."""

    number: int
    given: set[int] = field(default_factory=set)
    changed: list[torch.Tensor] = field(default_factory=list)
    parameters: set[str] = field(default_factory=set)
    reads: set[str] = field(default_factory=set)
    changes: set[str] = field(default_factory=set)
    mutates: set[int] = field(default_factory=set)
    needs: set[int] = field(default_factory=set)
    dropouts: int = 0
    in_dropout: bool = False
    batch_statistics: bool = False


def owner(path: str) -> str:
    return path.rpartition(".")[0]


def storage(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse or nested: it has none
        return -1


def version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def random_state() -> Any:
    import numpy as np

    kind, keys, place, *_ = np.random.get_state()
    return random.getstate(), kind, bytes(keys), place  # type: ignore[arg-type]


def modes() -> Any:
    kinds = ("cpu", "cuda")
    cast = [torch.is_autocast_enabled(one) and torch.get_autocast_dtype(one) for one in kinds]
    return [torch.is_inference_mode_enabled(), *cast]


def line() -> str:
    """Where the user's code is, as in ` (model.py, line 12)`."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((*_QUIET, "<frozen")):
        frame = frame.f_back
    if frame is None:
        return ""
    return f" ({Path(frame.f_code.co_filename).name}, line {frame.f_lineno})"
