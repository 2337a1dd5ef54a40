"""A learning-rate search restores the rank's state, and the hash would detect a difference."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training_case import request

from trainwright.tasks.data import dataset
from trainwright.tasks.errors import TrainingFailed
from trainwright.tasks.train import ramp
from trainwright.tasks.train.batch.sampling import epoch_order
from trainwright.tasks.train.exchange.collective import TorchCollective
from trainwright.tasks.train.rank.rank import Rank
from trainwright.tasks.train.worker.snapshot import Snapshot


class Silent:
    """A channel that drops all messages."""

    def progress(self, kind: str, **fields: Any) -> None:
        """Drop the message."""


@pytest.fixture
def rank(tmp_path: Path) -> Any:
    """A rank after a few steps: it has buffers, an optimizer state and a noise scale."""
    asked = request(
        tmp_path,
        [60],
        model={"norm": True, "dropout": 0.3},
        optimizer={"name": "adam"},
        adaptive_batch=True,
    )
    collective = TorchCollective(0, 1, str(tmp_path / "meeting"))
    one = Rank(asked, dataset.load(asked.job.data), collective, torch.device("cpu"), 0)
    order = epoch_order(one.train_rows, 0, 0)
    for step in range(3):
        one.step(order, 60 * step, step)
        one.update(0.01)
    yield one
    collective.shutdown()


def test_a_search_restores_the_hash_of_the_state(rank: Rank) -> None:
    from trainwright.tasks.train.worker.lr_ramp import search

    before = Snapshot(rank).digest()
    found = search(rank, Silent(), [10 ** (-4 + step / 5) for step in range(25)], 5)  # type: ignore[arg-type]
    assert len(found["trials"]) >= 3
    assert found["state"] == before == Snapshot(rank).digest()
    assert all(parameter.grad is None for parameter in rank.model.parameters())


def test_a_state_that_can_not_be_restored_fails_the_search(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainwright.tasks.train.worker.lr_ramp import search

    rank.model.register_forward_hook(lambda *_: random.seed(1))
    monkeypatch.setattr(random, "setstate", lambda _: None)
    with pytest.raises(TrainingFailed, match="could not be restored"):
        search(rank, Silent(), [0.01] * 3, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "part", ["parameter", "buffer", "optimizer", "torch", "numpy", "python", "noise", "split"]
)
def test_the_hash_covers_each_part_of_the_state_and_restoring_undoes_a_change(
    rank: Rank, part: str
) -> None:
    kept = Snapshot(rank)
    with torch.no_grad():
        if part == "parameter":
            next(rank.model.parameters()).view(-1)[0] += 1e-7
        elif part == "buffer":
            next(rank.model.buffers()).view(-1)[0] += 1e-3
        elif part == "optimizer":
            next(iter(rank.optimizer.state.values()))["exp_avg"].view(-1)[0] += 1e-3
    if part == "torch":
        torch.rand(1)
    elif part == "numpy":
        np.random.random()
    elif part == "python":
        random.random()
    elif part == "noise":
        rank.noise_scale.add(1.0, 1.0)
    elif part == "split":
        rank.split = [59]
    assert Snapshot(rank).digest() != kept.digest()
    kept.restore(rank)
    assert Snapshot(rank).digest() == kept.digest()


@pytest.mark.slow
def test_a_ramp_by_several_ranks_is_deterministic(tmp_path: Path) -> None:
    asked = request(tmp_path, [40, 20], optimizer={"name": "sgd"})
    assert ramp(asked, [0.1] * 5) == ramp(asked, [0.1] * 5)
