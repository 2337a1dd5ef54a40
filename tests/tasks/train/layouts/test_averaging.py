"""Ranks that train alone between averages of their parameters."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from joint_batch_case import BOUNDS, relative_difference
from layout_ranks import train_in_threads, with_layout
from training_case import LEARNING_RATE, alone, request

from trainwright.estimator.trace import source
from trainwright.tasks.data import dataset as data
from trainwright.tasks.train import TrainRequest
from trainwright.tasks.train.batch.sampling import epoch_order, shares
from trainwright.tasks.train.rank.rank import Rank


def state(rank: Rank) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in rank.model.state_dict().items()}


def averaged_alone(
    asked: TrainRequest, every: int, outer: str = "none", local_batch: int | None = None
) -> dict[str, torch.Tensor]:
    """The same training in one process: a model for each rank, by plain SGD and averages."""
    torch.manual_seed(asked.job.train.seed)
    torch.set_default_dtype(torch.float64)
    try:
        assert asked.job.model is not None
        first = source.build(
            source.load(Path(asked.source_folder), asked.entry), asked.job.model.config
        ).double()
    finally:
        torch.set_default_dtype(torch.float32)
    split = [one.batch_size for one in asked.plan.devices]
    models = [copy.deepcopy(first) for _ in split]
    anchor = [one.detach().clone() for one in first.parameters()]
    velocity = [torch.zeros_like(one) for one in anchor]
    dataset = data.load(asked.job.data, asked.job.train.seed)
    taken, step = [0] * len(split), 0
    for epoch in range(asked.job.train.epochs):
        order = epoch_order(dataset.split.train, asked.job.train.seed, epoch)
        for at in range(0, len(order), sum(split)):
            places = order[at : at + sum(split)]
            begin = 0
            for rank, size in enumerate(shares(len(places), split)):
                own = places[begin : begin + size]
                begin += size
                taken[rank] += size
                steps = max(1, round(size / local_batch)) if local_batch else 1
                for part in torch.as_tensor(own).tensor_split(steps):
                    if not len(part):
                        continue
                    inputs, targets = dataset.batch(part.numpy())
                    images = torch.from_numpy(inputs["inputs"]).double()
                    loss = torch.nn.functional.cross_entropy(
                        models[rank](images), torch.from_numpy(targets)
                    )
                    models[rank].zero_grad()
                    loss.backward()
                    with torch.no_grad():
                        for one in models[rank].parameters():
                            if one.grad is not None:
                                one -= LEARNING_RATE * one.grad
            step += 1
            last = at + sum(split) >= len(order) and epoch == asked.job.train.epochs - 1
            if step % every and not last:
                continue
            weights = [one / sum(taken) for one in taken]
            for number, old in enumerate(anchor):
                mine = [list(model.parameters())[number] for model in models]
                mean = sum(w * one.detach() for w, one in zip(weights, mine, strict=True))
                if outer == "block-momentum":
                    velocity[number] = 0.5 * velocity[number] + (mean - old)
                    mean = old + velocity[number]
                elif outer == "nesterov":
                    velocity[number] = 0.9 * velocity[number] + (old - mean)
                    mean = old - 0.7 * (0.9 * velocity[number] + old - mean)
                anchor[number] = mean.clone()
                with torch.no_grad():
                    for one in mine:
                        one.copy_(mean)
            taken = [0] * len(split)
    return dict(models[0].state_dict())


@pytest.mark.parametrize(
    "fields",
    [
        {"average_every": 4},
        {"average_every": 3, "outer": "block-momentum"},
        {"average_every": 3, "outer": "nesterov"},
        {"average_every": 1, "local_batch": 10},
    ],
    ids=["every 4", "block momentum", "nesterov", "local steps"],
)
def test_ranks_take_local_steps_and_the_weighted_average(
    tmp_path: Path, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The interval stays: divergence never counts as far or near.
    monkeypatch.setattr("trainwright.tasks.train.layouts.averaging.FAR", float("inf"))
    monkeypatch.setattr("trainwright.tasks.train.layouts.averaging.NEAR", -1.0)
    asked = request(
        tmp_path,
        [30, 20, 10],
        validation_fraction=1100 / 1797,
        precision="fp64",
        optimizer={"name": "sgd"},
    )
    found = train_in_threads(with_layout(asked, {}, **fields), tmp_path / "store", state)
    arguments = dict(fields)
    expected = averaged_alone(asked, arguments.pop("average_every"), **arguments)
    for one in found:
        assert relative_difference(one, expected) <= BOUNDS["fp64"]
    assert relative_difference(found[0], found[1]) == 0


def test_an_interval_of_one_is_the_sum_of_gradients(tmp_path: Path) -> None:
    asked = request(
        tmp_path,
        [30, 20, 10],
        validation_fraction=1100 / 1797,
        precision="fp64",
        optimizer={"name": "adamw", "weight_decay": 0.1},
    )
    found = train_in_threads(with_layout(asked, {}, average_every=1), tmp_path / "store", state)
    assert relative_difference(found[0], alone(asked)) <= BOUNDS["fp64"]
