"""Ranks that train alone between averages of their parameters."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from joint_batch_case import BOUNDS, relative_difference
from layout_ranks import ThreadExchange, Threads, train_in_threads, whole_state, with_layout
from training_case import LEARNING_RATE, WEIGHTED, alone, request

from trainwright.estimator.trace import source
from trainwright.estimator.trace.batch_loss import loss_function
from trainwright.tasks.data import dataset as data
from trainwright.tasks.train import TrainRequest
from trainwright.tasks.train.batch.sampling import epoch_order, shares
from trainwright.tasks.train.layouts.averaging import Averaging
from trainwright.tasks.train.rank.rank import Rank


def state(rank: Rank) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in rank.model.state_dict().items()}


def averaged_alone(
    asked: TrainRequest,
    every: int,
    outer: str = "none",
    local_batch: int | None = None,
    averaged: str = "",
) -> dict[str, torch.Tensor]:
    """The same training in one process: a model for each rank, by plain SGD and averages.

    Only parameters whose name begins with `averaged` are; the others' gradients are summed.
    """
    torch.manual_seed(asked.job.train.seed)
    torch.set_default_dtype(torch.float64)
    try:
        assert asked.job.model is not None
        definition = source.load(Path(asked.source_folder), asked.entry)
        first = source.build(definition, asked.job.model.config).double()
    finally:
        torch.set_default_dtype(torch.float32)
    split = [one.batch_size for one in asked.plan.devices]
    models = [copy.deepcopy(first) for _ in split]
    names = [name for name, _ in first.named_parameters()]
    anchor = [one.detach().clone() for one in first.parameters()]
    velocity = [torch.zeros_like(one) for one in anchor]
    dataset = data.load(asked.job.data, asked.job.train.seed)
    loss_of = loss_function(definition, asked.schema_.task)
    taken, step = [0.0] * len(split), 0
    for epoch in range(asked.job.train.epochs):
        order = epoch_order(dataset.split.train, asked.job.train.seed, epoch)
        for at in range(0, len(order), sum(split)):
            places = order[at : at + sum(split)]
            begin, sizes = 0, shares(len(places), split)
            weights = [0.0] * len(split)
            for rank, size in enumerate(sizes):
                own = places[begin : begin + size]
                begin += size
                steps = max(1, round(size / local_batch)) if local_batch else 1
                for part in torch.as_tensor(own).tensor_split(steps):
                    if not len(part):
                        continue
                    inputs, targets = dataset.batch(part.numpy())
                    images = torch.from_numpy(inputs["inputs"]).double()
                    loss, weight = loss_of.weighted(
                        models[rank](images), torch.from_numpy(targets), len(part)
                    )
                    weights[rank] += weight
                    models[rank].zero_grad()
                    loss.backward()
                    with torch.no_grad():
                        for one in models[rank].parameters():
                            if one.grad is not None:
                                one -= LEARNING_RATE * one.grad
            for name in [name for name in names if not name.startswith(averaged)]:
                # With plain SGD, the average of a step's results is the step of the sum.
                each = [dict(model.named_parameters())[name] for model in models]
                with torch.no_grad():
                    joint = sum(
                        weight / sum(weights) * one
                        for weight, one in zip(weights, each, strict=True)
                    )
                    for one in each:
                        one.copy_(joint)
            taken = [sum(pair) for pair in zip(taken, weights, strict=True)]
            step += 1
            last = at + sum(split) >= len(order) and epoch == asked.job.train.epochs - 1
            if step % every and not last:
                continue
            weights = [one / sum(taken) for one in taken]
            for number, old in enumerate(anchor):
                if not names[number].startswith(averaged):
                    continue
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
            taken = [0.0] * len(split)
    return dict(models[0].state_dict())


STAYS = {"FAR": float("inf"), "NEAR": -1.0}
"""Bounds of the divergence with which the interval stays."""


def stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, bound in STAYS.items():
        monkeypatch.setattr(f"trainwright.tasks.train.layouts.averaging.{name}", bound)


@pytest.mark.parametrize(
    "fields",
    [
        {"average_every": 4},
        {"average_every": 3, "outer": "block-momentum"},
        {"average_every": 3, "outer": "nesterov"},
        {"average_every": 1, "local_batch": 10},
        {"average_every": 3, "averaged": "out"},
        {"average_every": 4, "averaged": "conv", "outer": "nesterov"},
        {"average_every": 2, "local_batch": 4, "loss": "a pair"},
        {"average_every": 3, "averaged": "out", "loss": "a mean"},
    ],
    ids=[
        *("every 4", "block momentum", "nesterov", "local steps", "mixed", "mixed, nesterov"),
        *("local steps, weights", "mixed, weights"),
    ],
)
def test_ranks_take_local_steps_and_the_weighted_average(
    tmp_path: Path, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stays(monkeypatch)
    asked = request(
        tmp_path,
        [30, 20, 10],
        validation_fraction=1100 / 1797,
        precision="fp64",
        optimizer={"name": "sgd"},
    )
    arguments = dict(fields)
    with (Path(asked.source_folder) / "net.py").open("a") as own:
        own.write(WEIGHTED.get(arguments.pop("loss", ""), ""))
    expected = averaged_alone(asked, arguments.pop("average_every"), **arguments)
    layer = fields.get("averaged")
    layout = with_layout(
        asked,
        {} if layer is None else {layer: "average"},
        **{name: value for name, value in fields.items() if name not in ("averaged", "loss")},
    )
    found = train_in_threads(layout, tmp_path / "store", state)
    for one in found:
        assert relative_difference(one, expected) <= BOUNDS["fp64"]
    assert relative_difference(found[0], found[1]) == 0


@pytest.mark.parametrize(
    "layout",
    [
        {"sync": {}},
        {"sync": {"out": "average"}},
        {"sync": {"conv": "average", "out": "factors"}},
        {"sync": {"conv": "average", "out": "rows"}, "rows": {"out": [5, 3, 2]}},
    ],
    ids=["averaging", "others summed", "others late-multiplied", "others sharded"],
)
def test_averages_after_each_step_give_the_joint_gradient(
    tmp_path: Path, layout: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stays(monkeypatch)
    asked = request(
        tmp_path,
        [31, 20, 11],  # the last batch of an epoch is smaller
        validation_fraction=1100 / 1797,
        precision="fp64",
        model={"dropout": 0.4},
        optimizer={"name": "sgd"},
    )

    def before(rank: Rank, step: int) -> None:
        assert rank.averaging is not None
        rank.averaging.every = 1
        if step == 5:
            rank.validate()

    found = train_in_threads(
        with_layout(asked, average_every=4, **layout),
        tmp_path / "store",
        lambda rank: {name: one.clone() for name, one in whole_state(rank)[0].items()},
        before=before,
    )
    for one in found:
        assert relative_difference(one, alone(asked)) <= BOUNDS["fp64"]


def test_clipping_scales_all_ranks_alike(tmp_path: Path) -> None:
    asked = request(
        tmp_path,
        [30, 20, 10],
        validation_fraction=1100 / 1797,
        optimizer={"name": "momentum"},
        clip_norm=0.1,
    )
    mixed = with_layout(asked, {"out": "average"}, average_every=8)

    def summed_layer(rank: Rank) -> torch.Tensor:
        return rank.model.state_dict()["conv.weight"].clone()

    found = train_in_threads(mixed, tmp_path / "store", summed_layer, most_steps=5)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


class Ranks:
    """Ranks with one parameter each, which move as told and then average."""

    def __init__(self, count: int, store: Path, every: int = 8) -> None:
        threads, self.count = Threads(count), count
        self.parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(count)]
        self.averagings = []
        with ThreadPoolExecutor(count) as pool:
            peers = list(pool.map(lambda one: ThreadExchange(one, threads, store), range(count)))
        for one, exchange in zip(self.parameters, peers, strict=True):
            optimizer = torch.optim.SGD([one], lr=1.0)
            self.averagings.append(Averaging([one], [], optimizer, exchange, every, "none"))
            self.averagings[-1].begin()
            exchange.shutdown()  # sums need no connection

    def average(self, to: list[list[float]], samples: list[int], holds: list[bool]) -> None:
        """Move each rank's parameter, with so many samples, and average."""

        def work(number: int) -> None:
            with torch.no_grad():
                self.parameters[number].copy_(torch.tensor(to[number]))
            self.averagings[number].step_done(samples[number])
            self.averagings[number].average(holds=holds[number])

        with ThreadPoolExecutor(self.count) as pool:
            list(pool.map(work, range(self.count)))


def test_ranks_that_go_opposite_ways_average_more_often(tmp_path: Path) -> None:
    ranks = Ranks(2, tmp_path / "store")
    ranks.average([[1.0, 1.0], [-1.0, 1.01]], [10, 10], [True, True])
    assert ranks.averagings[0].divergence == pytest.approx(1.0, rel=0.02)
    assert [one.every for one in ranks.averagings] == [8, 8]
    at = ranks.parameters[0].tolist()
    ranks.average([[at[0] + 1, at[1]], [at[0] - 0.9, at[1]]], [10, 10], [True, True])
    assert ranks.averagings[0].divergence > 100
    assert [one.every for one in ranks.averagings] == [4, 4]
    at = ranks.parameters[0].tolist()
    ranks.average([[at[0] + 1, at[1]], [at[0] + 1.1, at[1]]], [10, 10], [True, True])
    assert ranks.averagings[1].divergence == pytest.approx(0.5, rel=0.01)
    assert [one.every for one in ranks.averagings] == [8, 8]


def test_a_rank_without_state_adds_nothing_to_an_average(tmp_path: Path) -> None:
    ranks = Ranks(3, tmp_path / "store")
    ranks.average([[1.0, 0.0], [4.0, 0.0], [100.0, 0.0]], [20, 10, 0], [True, True, False])
    for one in ranks.parameters:
        assert one.tolist() == pytest.approx([2.0, 0.0])


def test_the_state_of_averages_is_in_a_checkpoint(tmp_path: Path) -> None:
    asked = request(tmp_path, [30, 20], validation_fraction=1100 / 1797)
    layout = with_layout(asked, {}, average_every=8, outer="nesterov")

    def saved(rank: Rank) -> Any:
        assert rank.averaging is not None
        rank.averaging.every, rank.averaging.divergence = 4, 2.5
        return rank.noise_document(), *whole_state(rank)

    document, model, optimizer = train_in_threads(layout, tmp_path / "store", saved)[0]
    velocities = {name: one for name, one in optimizer.items() if name.startswith("velocity.")}
    assert velocities
    # Another number of ranks, with and without averages, takes it.
    another = request(tmp_path, [20, 20, 20], validation_fraction=1100 / 1797)
    again = {
        "averaging": with_layout(another, {}, average_every=6, outer="nesterov"),
        "summed": with_layout(another, {}),
    }

    def taken(rank: Rank) -> Any:
        rank.load_state(model)
        rank.load_optimizer_state(optimizer)
        rank.load_noise(document)
        assert relative_difference(state(rank), model) == 0
        averaging = rank.averaging
        return averaging and (averaging.document(), averaging.velocities)

    for name, each in again.items():
        found = train_in_threads(each, tmp_path / name, taken, most_steps=0)[2]
        if name == "averaging":
            assert found[0] == {**document["averaging"], "every": 4}
            assert found[0]["divergence"] == 2.5
            assert all(torch.equal(found[1][key], one) for key, one in velocities.items())
        else:
            assert found is None


def test_moments_and_counters_are_averaged_for_a_checkpoint(tmp_path: Path) -> None:
    asked = request(
        tmp_path,
        [40, 20],
        validation_fraction=1100 / 1797,
        model={"norm": True},
        optimizer={"name": "adamw"},
    )
    layout = with_layout(asked, {}, average_every=5, local_batch=20)

    def whole(rank: Rank) -> Any:
        model, optimizer = whole_state(rank)
        return {**model, **optimizer}

    # The first rank does two local steps in a step, with two thirds of the samples.
    found = train_in_threads(layout, tmp_path / "store", whole, most_steps=10)
    assert relative_difference(*found) == 0
    steps = {float(one) for name, one in found[0].items() if name.startswith("step.")}
    assert steps == {round(20 * 2 / 3 + 10 / 3)}
    first = round(10 * 2 / 3 + 5 / 3)
    assert int(found[0]["norm.num_batches_tracked"]) == round(first + 10 * 2 / 3 + 5 / 3)


@pytest.mark.parametrize(
    "layout",
    [
        {"sync": {}, "average_every": 4, "local_batch": 20, "outer": "nesterov"},
        {"sync": {"out": "average"}, "average_every": 4, "outer": "block-momentum"},
        {"sync": {"conv": "average", "out": "rows"}, "rows": {"out": [6, 4]}, "average_every": 8},
    ],
    ids=["averaging", "mixed", "mixed with rows"],
)
def test_a_training_goes_on_from_a_checkpoint_as_it_did_after_it(
    tmp_path: Path, layout: dict[str, Any]
) -> None:
    asked = request(
        tmp_path,
        [40, 20],
        validation_fraction=1100 / 1797,
        model={"norm": True, "dropout": 0.3},
        optimizer={"name": "adamw"},
    )
    given = with_layout(asked, **layout)
    saved: dict[int, Any] = {}

    def save(rank: Rank, step: int) -> None:
        if step == 6:
            rank.average(moments=True)
            rank.join_squares()
            whole = [
                {name: one.clone() for name, one in part.items()} for part in whole_state(rank)
            ]
            saved[rank.number] = rank.noise_document(), *whole

    def load(rank: Rank, step: int) -> None:
        if step == 6:
            document, model, optimizer = saved[0]
            rank.begin_anew()
            rank.load_state(model)
            rank.load_optimizer_state({name: one.clone() for name, one in optimizer.items()})
            rank.load_noise(document)
            rank.cut([0, 1])

    def whole(rank: Rank) -> Any:
        rank.join_squares()
        tensors = [{name: one.clone() for name, one in part.items()} for part in whole_state(rank)]
        return [*tensors, rank.noise_document()]

    expected = train_in_threads(given, tmp_path / "first", whole, before=save)
    found = train_in_threads(given, tmp_path / "second", whole, before=load)
    for mine, other in zip(found, expected, strict=True):
        assert relative_difference(mine[0], other[0]) == 0
        assert relative_difference(mine[1], other[1]) == 0
        assert mine[2] == other[2]
