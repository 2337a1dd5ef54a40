"""A copy of all state of a rank that training changes, to restore it exactly."""

from __future__ import annotations

import copy
import hashlib
import random
from typing import Any

import torch  # noqa: TID253 - only ranks import this

from trainwright.tasks.train.rank.rank import Rank


class Snapshot:
    """Model, optimizer, noise scale, and the random states of torch, NumPy and Python."""

    def __init__(self, rank: Rank) -> None:
        import numpy as np

        self._model = {
            name: value.detach().clone() for name, value in rank.model.state_dict().items()
        }
        self._optimizer = copy.deepcopy(rank.optimizer.state_dict())
        self._noise = rank.noise_document()
        self._split = list(rank.split)
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(rank.device) if rank.device.type == "cuda" else None
        self._numpy: Any = np.random.get_state()
        self._python = random.getstate()

    def restore(self, rank: Rank) -> None:
        """Restore all state, and clear the gradients."""
        import numpy as np

        rank.model.load_state_dict(self._model)
        rank.optimizer.load_state_dict(copy.deepcopy(self._optimizer))
        rank.optimizer.zero_grad(set_to_none=True)
        rank.load_noise(self._noise)
        if rank.averaging is not None:
            rank.averaging.velocities = {}  # a search starts without
            rank.averaging.begin()
        rank.split = list(self._split)
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, rank.device)
        np.random.set_state(self._numpy)
        random.setstate(self._python)

    def digest(self) -> str:
        """SHA-256 of the whole state."""
        whole = hashlib.sha256()
        for name, value in self._model.items():
            whole.update(name.encode())
            whole.update(_bytes(value))
        for number, values in sorted(self._optimizer["state"].items()):
            for name, value in sorted(values.items()):
                whole.update(f"{number}.{name}".encode())
                whole.update(
                    _bytes(value) if isinstance(value, torch.Tensor) else repr(value).encode()
                )
        whole.update(repr(self._optimizer["param_groups"]).encode())
        whole.update(repr((self._noise, self._split, self._python)).encode())
        whole.update(_bytes(self._torch))
        if self._cuda is not None:
            whole.update(_bytes(self._cuda))
        whole.update(
            b"".join(
                str(part).encode() if not hasattr(part, "tobytes") else part.tobytes()
                for part in self._numpy
            )
        )
        return whole.hexdigest()


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
