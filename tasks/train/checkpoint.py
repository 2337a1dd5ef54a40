"""Checkpoints: checkpoints/step-00000120/{model.safetensors, optimizer.safetensors, state.json}.

state.json is written last and holds the SHA-256 of the others: a checkpoint without it does not exist. What is damaged is passed
over for the one before. Tensors are safetensors; nothing is pickled.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.tasks.errors import CorruptArtefact
from trainwright.tasks.job import CheckpointPolicy
from trainwright.tasks.objects import ObjectStore, get_verified, sha256

if TYPE_CHECKING:
    import torch

MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
_log = logging.getLogger(__name__)


@dataclass
class State:
    """What, besides tensors, the training goes on from. `step` is the number of finished steps."""

    step: int
    epoch: int
    split: list[int]
    metrics: dict[str, float] = field(default_factory=dict)
    """of the last finished epoch"""
    best: bool = False
    """whether this checkpoint's metrics are the best so far"""
    best_score: float | None = None
    events: list[dict[str, Any]] = field(default_factory=list)
    """changes of the split so far"""
    epoch_loss_sum: float = 0.0
    epoch_samples: int = 0
    samples: int = -1
    """taken since the training began: with the rows, its place in the epoch; -1: written before there was such a count"""
    adaptive: dict[str, Any] = field(default_factory=dict)
    """the noise scale, and the batch's growth where the job lets it grow"""
    duration_s: float = 0.0
    """of the whole training until here"""
    sha256: dict[str, str] = field(default_factory=dict)
    schema_version: int = 1


def initial_batch(state: State) -> int:
    """The global batch that the training began with."""
    return int(state.adaptive["growth"]["base"]) if "growth" in state.adaptive else sum(state.split)


def folder_name(step: int) -> str:
    """The folder of the checkpoint after this many steps."""
    return f"checkpoints/step-{step:08d}"


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's state: `exp_avg.3` is of the fourth parameter. The tensors themselves, where it holds tensors."""
    import torch

    return {
        f"{name}.{number}": torch.as_tensor(value)
        for number, values in optimizer.state_dict()["state"].items()
        for name, value in values.items()
        if value is not None
    }


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
) -> None:
    """Write a checkpoint, then drop those that the policy no longer keeps."""
    for name, tensors in ((MODEL, model), (OPTIMIZER, optimizer_tensors(optimizer))):
        data = _as_bytes(tensors)
        store.put(f"{folder_name(state.step)}/{name}", data)
        state.sha256[name] = sha256(data)
    store.put(f"{folder_name(state.step)}/{STATE}", json.dumps(asdict(state), indent=1).encode())
    _retain(store, policy)


def _as_bytes(tensors: dict[str, torch.Tensor]) -> bytes:
    from safetensors.torch import save as to_bytes

    # safetensors refuses tensors that share memory, as tied weights do: each gets its own copy.
    data: bytes = to_bytes({name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()})
    return data


def _retain(store: ObjectStore, policy: CheckpointPolicy) -> None:
    states = list_states(store)
    keep = {state.step for state in states[-policy.keep_last :]}
    best = best_of(states)
    if policy.keep_best and best is not None:
        keep.add(best.step)
    for state in states:
        if state.step not in keep:
            for name in (STATE, MODEL, OPTIMIZER):  # the state first: half a checkpoint is none
                store.delete(f"{folder_name(state.step)}/{name}")


def drop_all(store: ObjectStore) -> None:
    """Forget every checkpoint: a training begins anew."""
    for item in list(store.list("checkpoints/")):
        store.delete(item.key)


def _parsed(data: bytes) -> State:
    """A state as it was written; fields of a later version are passed over."""
    document = json.loads(data)
    return State(**{name: document[name] for name in document if name in State.__dataclass_fields__})


def list_states(store: ObjectStore) -> list[State]:
    """The states of the checkpoints, by step. One that can't be read is passed over, with a warning."""
    found = []
    for item in list(store.list("checkpoints/")):
        if item.key.endswith(f"/{STATE}"):
            try:
                found.append(_parsed(store.get(item.key)))
            except (ValueError, TypeError) as error:
                _log.warning("%s/%s is damaged and passed over: %s", store.uri, item.key, error)
    return sorted(found, key=lambda state: state.step)


def best_of(states: list[State]) -> State | None:
    """The newest of those that were the best when they were written."""
    return next((state for state in reversed(states) if state.best), None)


def fetch_latest(store: ObjectStore, into: Path) -> State | None:
    """Bring the newest checkpoint that is whole into a folder; None where there is none."""
    for state in reversed(list_states(store)):
        try:
            for name in (MODEL, OPTIMIZER):
                data = get_verified(store, f"{folder_name(state.step)}/{name}", state.sha256.get(name, ""))
                into.mkdir(parents=True, exist_ok=True)
                (into / name).write_bytes(data)
        except CorruptArtefact as error:
            _log.warning("%s; the checkpoint before is used", error)
            continue
        (into / STATE).write_text(json.dumps(asdict(state)))
        return state
    return None


def read_local(folder: Path) -> tuple[State, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """State, model and optimizer of a checkpoint that `fetch_latest` brought here."""
    from safetensors.torch import load_file

    state = _parsed((folder / STATE).read_bytes())
    return state, load_file(folder / MODEL), load_file(folder / OPTIMIZER)
