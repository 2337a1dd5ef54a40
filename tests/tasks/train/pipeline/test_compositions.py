"""Every composition of pipelines, data parallel, factors and rows trains as one process does."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from families import FAMILIES, HEAD, TAIL, source_of
from joint_batch_case import BOUNDS, relative_difference
from layout_ranks import ThreadExchange, train_in_threads, whole_state
from staged_case import recomputing, with_dense, with_stages, without_dropout
from test_pipelines import request_of
from test_sent_bytes import CountedTransfers
from training_case import WEIGHTED, alone, request

from trainwright.tasks.allocate.actions.action import MESSAGES, TRANSFERS
from trainwright.tasks.allocate.actions.actions import actions_of
from trainwright.tasks.allocate.actions.transfer_sizes import TransferSizes
from trainwright.tasks.runs.artefacts.layout import StageSchedule, Sync
from trainwright.tasks.train import TrainRequest
from trainwright.tasks.train.rank.rank import Rank

MODEL = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(18, 8)
        self.down, self.low = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1)
        self.up, self.join = nn.ConvTranspose2d(6, 4, 2, stride=2), nn.Conv2d(8, 8, 1)
        self.rnn = nn.GRU(64, 12, batch_first=True)
        self.mix, self.drop, self.out = nn.Linear(20, 16), nn.Dropout(0.3), nn.Linear(16, 8)

    def forward(self, images):
        tokens = images.flatten(1)[:, :20].round().long().clamp(0, 17)
        seen = self.table(tokens).mean(1)
        skip = torch.relu(self.down(images))
        low = torch.relu(self.low(nn.functional.max_pool2d(skip, 2)))
        found = torch.relu(self.join(torch.cat([skip, self.up(low)], dim=1)))
        _, last = self.rnn(found.permute(0, 2, 1, 3).flatten(2))
        found = self.drop(torch.tanh(self.mix(torch.cat([last[0], seen], dim=1))))
        return nn.functional.linear(self.out(found), self.table.weight)[:, :10]
"""
"""With a skip over a cut, a recurrent layer, dropout, and a weight that two stages use."""
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "momentum, clipped, weights": {"optimizer": {"name": "momentum"}, "clip_norm": 0.5},
    "adamw": {"optimizer": {"name": "adamw", "weight_decay": 0.1}},
}
Pipelines = list[tuple[list[int], list[float]]]
ALIKE: Pipelines = [([20, 12, 8], [0.5]), ([8, 8, 6], [0.5])]
"""Two pipelines of two stages, with uneven micro-batches."""
UNLIKE: Pipelines = [([20, 12, 8], [0.35, 0.7]), ([12, 10], [0.5])]
WHOLE: Pipelines = [([20, 20], [0.5]), ([22], [])]
"""The second one has the whole model."""


class Composition(NamedTuple):
    """A layout, and the ways of its dense layers."""

    pipelines: Pipelines
    ways: tuple[Sync, ...] = ()
    schedule: StageSchedule = "1f1b"


SCHEDULES: tuple[StageSchedule, ...] = ("gpipe", "1f1b", "zero-bubble")
COMPOSITIONS = {
    "pipeline": Composition([([24, 20, 18], [0.35, 0.7])]),
    "unlike pipelines": Composition(UNLIKE, (), "gpipe"),
    "factors": Composition(ALIKE, ("factors",), "gpipe"),
    "factors, unlike pipelines": Composition(UNLIKE, ("factors",), "zero-bubble"),
    "factors, one whole model": Composition(WHOLE, ("factors", "sum")),
    "rows": Composition(ALIKE, ("rows",)),
    "rows and factors": Composition(ALIKE, ("rows", "factors"), "zero-bubble"),
    "rows and sums": Composition(ALIKE, ("rows", "sum"), "gpipe"),
}


def state(rank: Rank) -> dict[str, torch.Tensor]:
    """The whole model, after an evaluation."""
    rank.validate()
    return {name: value.clone() for name, value in whole_state(rank)[0].items()}


def evaluate(rank: Rank, step: int) -> None:
    """Between two steps, all ranks at once."""
    if step == 7:
        rank.validate()


def composed(asked: TrainRequest, one: Composition) -> TrainRequest:
    """The request with a composition on its plan's devices."""
    staged = with_stages(asked, one.pipelines, one.schedule)
    return with_dense(staged, one.ways) if one.ways else staged


def batch_sizes(pipelines: Pipelines) -> list[int]:
    """The parts of the batch of their devices."""
    return [part for sizes, cuts in pipelines for part in (sum(sizes), *(0 for _ in cuts))]


@pytest.mark.parametrize(
    ("way", "name"),
    [(list(OPTIMIZERS)[place % 2], name) for place, name in enumerate(COMPOSITIONS)],
)
def test_a_composition_equals_one_process(tmp_path: Path, way: str, name: str) -> None:
    one = COMPOSITIONS[name]
    asked = request(
        tmp_path,
        batch_sizes(one.pipelines),
        validation_fraction=1480 / 1797,  # six steps, of which the last one is smaller
        epochs=2,
        precision="fp64",
        **OPTIMIZERS[way],
    )
    forms = ["a mean", "a pair"]
    loss = WEIGHTED[forms[len(name) % 2]] if way == "momentum, clipped, weights" else ""
    (Path(asked.source_folder) / "net.py").write_text(HEAD + MODEL + TAIL + loss)
    staged = composed(asked, one)
    assert staged.plan.layout is not None
    assert set(staged.plan.layout.sync.values()) == {*one.ways}
    found = train_in_threads(staged, tmp_path / "store", state, before=evaluate)
    expected = alone(asked)
    for each in found:
        assert relative_difference(each, expected) <= BOUNDS["fp64"]


@pytest.mark.parametrize(
    ("precision", "name"),
    [(("fp64", "fp32")[place % 2], name) for place, name in enumerate(COMPOSITIONS)],
)
def test_a_composition_equals_one_process_in_fp32_and_if_it_recomputes(
    tmp_path: Path, precision: str, name: str
) -> None:
    one = COMPOSITIONS[name]
    asked = request(
        tmp_path,
        batch_sizes(one.pipelines),
        validation_fraction=1480 / 1797,
        precision=precision,
        **OPTIMIZERS["momentum, clipped, weights"],
    )
    (Path(asked.source_folder) / "net.py").write_text(without_dropout(HEAD + MODEL + TAIL))
    staged = recomputing(composed(asked, one), 2)
    found = train_in_threads(staged, tmp_path / "store", state, before=evaluate)
    expected = alone(asked)
    for each in found:
        assert relative_difference(each, expected) <= BOUNDS[precision]


@pytest.mark.parametrize(
    ("family", "schedule"),
    [(family, SCHEDULES[place % 3]) for place, family in enumerate(FAMILIES)],
)
def test_an_unmodified_model_trains_as_one_process(
    tmp_path: Path, family: str, schedule: StageSchedule
) -> None:
    asked = request_of(tmp_path, batch_sizes(ALIKE), family)
    # Joint statistics of batches need one micro-batch.
    joint = "BatchNorm" in source_of(family)
    pipelines: Pipelines = [([40], [0.5]), ([22], [0.5])] if joint else ALIKE
    staged = composed(asked, Composition(pipelines, ("rows", "factors", "sum"), schedule))
    found = train_in_threads(staged, tmp_path / "store", state, before=evaluate)
    expected = alone(asked)
    for one in found:
        assert relative_difference(one, expected) <= BOUNDS["fp64"]


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_ranks_send_what_was_predicted(tmp_path: Path, name: str) -> None:
    one = COMPOSITIONS[name]
    asked = request(tmp_path, batch_sizes(one.pipelines), validation_fraction=1480 / 1797)
    (Path(asked.source_folder) / "net.py").write_text(HEAD + MODEL + TAIL)
    staged = composed(asked, one)

    def count(rank: Rank, step: int) -> None:
        transfers = rank.collective.transfers
        assert transfers is not None
        transfers.__class__ = CountedTransfers
        transfers.counted = Counter()  # type: ignore[attr-defined]

    def counted(rank: Rank) -> dict[str, float]:
        exchange = rank.collective
        assert isinstance(exchange, ThreadExchange)
        assert isinstance(exchange.transfers, CountedTransfers)
        return by_kind(exchange.transfers.counted)

    found = train_in_threads(staged, tmp_path / "store", counted, most_steps=1, before=count)
    layout, layers, units = staged.plan.layout, staged.plan.layers, staged.plan.units
    assert layout is not None
    sizes = TransferSizes(layout, layers, units)
    for rank, (sent, actions) in enumerate(
        zip(found, actions_of(layout, layers, units), strict=True)
    ):
        planned = Counter[str]()
        for action in actions:
            apart = action.kind in TRANSFERS and action.chunk is None and action.kind != "agree"
            if action.kind == "send" or apart:
                moved = float(sizes.of(action).sent_bytes(len(layout.devices))[rank])
                planned[kind_of(action.name, is_message=action.kind in MESSAGES)] += moved
        assert sent == {kind: size for kind, size in planned.items() if size}


def by_kind(counted: Counter[str]) -> dict[str, float]:
    """The bytes of messages but those of sums: activations, gradients, and by layer."""
    found = Counter[str]()
    for name, size in counted.items():
        first, _, rest = name.partition(" ")
        if first != "sum":
            found[kind_of(rest, is_message=first == "message")] += size
    return {kind: float(size) for kind, size in found.items() if size}


def kind_of(name: str, *, is_message: bool) -> str:
    """Such as activations; or inputs fc 0, of the first micro-batch of a layer."""
    return name.partition(" ")[0] if is_message else name.partition(" among ")[0]
