"""Checkpoints: checkpoints/step-00000120/{model.safetensors, optimizer.safetensors, state.json}.

state.json is written last and holds the SHA-256 of the others: a checkpoint without it does not exist. What is damaged is passed
over for the one before. Tensors are safetensors; nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.tasks.errors import CorruptArtefact
from trainwright.tasks.job import CheckpointPolicy
from trainwright.tasks.objects import ObjectStore, get_verified

if TYPE_CHECKING:
    import torch

TENSOR_FILES = ("model.safetensors", "optimizer.safetensors")


@dataclass
class State:
    """What, besides tensors, the training goes on from. `step` is the number of finished steps."""

    step: int
    epoch: int
    split: list[int]
    metrics: dict[str, float] = field(default_factory=dict)
    best: bool = False
    events: list[dict[str, Any]] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    sha256: dict[str, str] = field(default_factory=dict)


def folder_name(step: int) -> str:
    """The folder of the checkpoint after this many steps."""
    return f"checkpoints/step-{step:08d}"


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's state as named tensors: `exp_avg.3` is of the fourth parameter."""
    import torch

    found = {}
    for number, values in optimizer.state_dict()["state"].items():
        for name, value in values.items():
            if value is not None:
                found[f"{name}.{number}"] = torch.as_tensor(value).detach().clone()
    return found


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]) -> None:
    """Put `optimizer_tensors` back."""
    state: dict[int, dict[str, Any]] = {}
    for key, value in tensors.items():
        name, number = key.rsplit(".", 1)
        state.setdefault(int(number), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def save(
    store: ObjectStore,
    state: State,
    model: dict[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
    policy: CheckpointPolicy,
) -> str:
    """Write a checkpoint, then drop those that the policy no longer keeps; its folder."""
    from safetensors.torch import save as to_bytes

    folder = folder_name(state.step)
    contents = {
        "model.safetensors": to_bytes(
            {name: value.detach().cpu().clone().contiguous() for name, value in model.items()}
        ),
        "optimizer.safetensors": to_bytes({name: value.cpu() for name, value in optimizer_tensors(optimizer).items()}),
    }
    for name, data in contents.items():
        store.put(f"{folder}/{name}", data)
    state.sha256 = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
    store.put(f"{folder}/state.json", json.dumps(state.__dict__, indent=1).encode())
    _retain(store, policy)
    return folder


def _retain(store: ObjectStore, policy: CheckpointPolicy) -> None:
    states = list_states(store)
    keep = {state.step for state in states[-policy.keep_last :]}
    if policy.keep_best:
        keep |= {state.step for state in [state for state in states if state.best][-1:]}
    for state in states:
        if state.step not in keep:
            for name in ("state.json", *TENSOR_FILES):  # state.json first: half a checkpoint is none
                store.delete(f"{folder_name(state.step)}/{name}")


def list_states(store: ObjectStore) -> list[State]:
    """The complete checkpoints, by step. One whose state can't be read is passed over."""
    found = []
    for item in store.list("checkpoints/"):
        if item.key.endswith("/state.json"):
            try:
                found.append(State(**json.loads(store.get(item.key))))
            except (ValueError, TypeError, FileNotFoundError):
                continue
    return sorted(found, key=lambda state: state.step)


def fetch(store: ObjectStore, state: State, into: Path) -> None:
    """Bring a checkpoint here, verified. Raises CorruptArtefact."""
    for name in TENSOR_FILES:
        data = get_verified(store, f"{folder_name(state.step)}/{name}", state.sha256.get(name, ""))
        into.mkdir(parents=True, exist_ok=True)
        (into / name).write_bytes(data)


def fetch_latest(store: ObjectStore, into: Path) -> State | None:
    """Bring the newest checkpoint that is whole here; None where there is none."""
    for state in reversed(list_states(store)):
        try:
            fetch(store, state, into)
        except CorruptArtefact:
            continue
        return state
    return None
