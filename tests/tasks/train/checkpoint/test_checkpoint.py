"""Checkpoints in the store: retention, damage, other versions, the optimizer's state."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from finished_run import save_checkpoint

from trainwright.tasks import progress
from trainwright.tasks.spec.train_spec import CheckpointPolicy
from trainwright.tasks.storage.folder import FolderStore
from trainwright.tasks.storage.objects import sha256
from trainwright.tasks.train.checkpoint import fence, files, tensors


def saved(store: FolderStore, steps: dict[int, bool], policy: CheckpointPolicy) -> None:
    """Save checkpoints of these steps (True: the best so far); the weights equal the step."""
    weights = {"weight": torch.zeros(2)}
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))])
    for step, best in steps.items():
        weights["weight"].fill_(step)
        state = files.CheckpointState(step=step, epoch=0, split=[2, 1], best=best)
        save_checkpoint(store, state, weights, optimizer, policy)


def test_the_newest_and_the_best_checkpoints_are_kept(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    saved(
        store, {10: False, 20: True, 30: False, 40: False, 50: False}, CheckpointPolicy(keep_last=2)
    )
    assert [state.step for state in files.list_states(store)] == [20, 40, 50]
    assert {item.key.split("/")[1] for item in store.list("checkpoints/")} == {
        "step-00000020",
        "step-00000040",
        "step-00000050",
    }


@pytest.mark.parametrize("damage", ["cut", "changed", "missing", "state", "no state"])
def test_a_damaged_checkpoint_is_skipped_for_the_one_before(tmp_path: Path, damage: str) -> None:
    store = FolderStore(tmp_path / "run")
    saved(store, {10: False, 20: False}, CheckpointPolicy())
    folder = "checkpoints/step-00000020"
    model = store.get(f"{folder}/model.safetensors")
    if damage == "cut":
        store.put(f"{folder}/model.safetensors", model[:-1])
    elif damage == "changed":
        store.put(f"{folder}/model.safetensors", model[:-1] + b"!")
    elif damage == "missing":
        store.delete(f"{folder}/optimizer.safetensors")
    elif damage == "state":
        store.put(f"{folder}/state.json", b'{"step": 20')
    else:
        store.delete(f"{folder}/state.json")
    found = files.fetch_latest(store, tmp_path / "here")
    assert found is not None
    assert found.step == 10
    assert (tmp_path / "here/model.safetensors").read_bytes() == store.get(
        "checkpoints/step-00000010/model.safetensors"
    )


def test_if_all_checkpoints_are_damaged_a_notice_says_that_training_starts_from_step_0(
    tmp_path: Path,
) -> None:
    store, messages = FolderStore(tmp_path / "run"), list[str]()
    saved(store, {10: False, 20: False}, CheckpointPolicy())
    for step in (10, 20):
        store.put(f"checkpoints/step-{step:08d}/model.safetensors", b"!")
    with progress.listening(lambda event: messages.append(event["message"])):
        assert files.fetch_latest(store, tmp_path / "here") is None
    assert "step-00000020" in messages[0]
    assert "step-00000010" in messages[1]
    assert messages[0].endswith("; the checkpoint before it is used")
    assert messages[1].endswith("; there is none before it: training starts from step 0")


def test_fetching_from_a_run_without_checkpoints_returns_none(tmp_path: Path) -> None:
    assert files.fetch_latest(FolderStore(tmp_path), tmp_path / "here") is None


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_an_optimizers_state_survives_the_round_trip(name: str) -> None:
    def make(parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
        if name == "adam":
            return torch.optim.Adam([parameter], lr=0.1)
        return torch.optim.SGD([parameter], lr=0.1, momentum=0.9)

    def step(parameter: torch.nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
        parameter.grad = parameter.detach() * 2 + 1
        optimizer.step()

    first = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    one = make(first)
    step(first, one)
    second = torch.nn.Parameter(first.detach().clone())
    other = make(second)
    kept = {key: value.clone() for key, value in tensors.optimizer_tensors(one).items()}
    tensors.load_optimizer(other, kept)
    step(first, one)
    step(second, other)
    assert torch.equal(first, second)


def test_training_resumes_from_a_checkpoint_of_a_later_version(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "run")
    saved(store, {10: False}, CheckpointPolicy())
    key, index = "checkpoints/step-00000010/state.json", fence.INDEX
    before = store.get(key)
    later = before.replace(b"{", b'{"of_a_later_version": 1, ', 1)
    store.put(key, later)
    store.put(index, store.get(index).replace(sha256(before).encode(), sha256(later).encode()))
    found = files.fetch_latest(store, tmp_path / "here")
    assert found is not None
    assert found.step == 10


def test_training_resumes_a_run_that_has_no_index(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "run")
    saved(store, {10: False, 20: True}, CheckpointPolicy())
    store.delete(fence.INDEX)
    for step in (10, 20):
        key = f"checkpoints/step-{step:08d}/state.json"
        document = json.loads(store.get(key))
        for name in ("size_bytes", "owner", "token"):
            del document[name]
        store.put(key, json.dumps(document | {"schema_version": 1}).encode())
    found = files.fetch_latest(store, tmp_path / "here")
    assert found is not None
    assert found.step == 20
    assert fence.claim(store, 3).require().checkpoints[1].best
    assert [state.step for state in files.list_states(store)] == [10, 20]
