"""Layouts whose ranks differ: in the layers that their samples use, and in half precision."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from joint_batch_case import BOUNDS, relative_difference
from layout_ranks import train_in_threads, with_layout
from test_exactness import state
from torch import nn
from training_case import alone, request

from trainwright.tasks.runs.artefacts.layout import Sync
from trainwright.tasks.train.exchange.peers import Peers
from trainwright.tasks.train.layouts import late_multiply
from trainwright.tasks.train.layouts.factors import Dense, Factors, multiply, square
from trainwright.tasks.train.layouts.sharded import Sharded
from trainwright.tasks.train.rank.rank import Rank

SOMETIMES = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 24)
        self.some = nn.Linear(24, 24)
        self.last = nn.Linear(24, 10)

    def forward(self, images):
        found = torch.tanh(self.first(images.flatten(1)))
        if len(images) > 15:
            found = torch.tanh(self.some(found))
        return self.last(found)


def build_model():
    return Net()
"""
"""A rank with few samples does not use the layer `some`."""


@pytest.mark.parametrize("others", ["factors", "sum"])
def test_a_layer_that_only_some_ranks_use_is_late_multiplied(tmp_path: Path, others: Sync) -> None:
    asked = request(tmp_path, [31, 20, 11], validation_fraction=1500 / 1797, precision="fp64")
    (Path(asked.source_folder) / "net.py").write_text(SOMETIMES)
    summed = train_in_threads(with_layout(asked, {}), tmp_path / "summed", state)
    sync: dict[str, Sync] = {"some": "factors", "first": others}
    late = train_in_threads(with_layout(asked, sync, chunk_bytes=1024), tmp_path / "late", state)
    for one, other in zip(late, summed, strict=True):
        assert relative_difference(one, other) <= BOUNDS["fp64"]


def test_processors_that_round_differently_clip_by_the_same_norm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request(
        tmp_path, [30, 20, 10], validation_fraction=1500 / 1797, optimizer={"name": "momentum"}
    )
    clipped = asked.job.train.model_copy(update={"clip_norm": 0.2})
    asked = asked.model_copy(update={"job": asked.job.model_copy(update={"train": clipped})})
    numbers: dict[int, int] = {}

    def rounded(module: Dense, factors: Factors) -> list[torch.Tensor]:
        off = 1 + 1e-6 * numbers[threading.get_ident()]
        return [one * off for one in multiply(module, factors)]

    monkeypatch.setattr(late_multiply, "multiply", rounded)

    def note(rank: Rank, step: int) -> None:
        numbers[threading.get_ident()] = rank.number

    def after(resend_every: int | None) -> list[dict[str, torch.Tensor]]:
        late = with_layout(asked, {"out": "factors"}, resend_every=resend_every)
        folder = tmp_path / str(resend_every)
        return train_in_threads(late, folder, state, before=note)

    first, *others = after(resend_every=1000)
    for one in others:
        assert not torch.equal(first["out.weight"], one["out.weight"])
        assert relative_difference(first, one) < 1e-5
    # Each rank's own forward pass gives its own gradients of `conv`, but their sum is the same.
    assert all(torch.equal(first["conv.weight"], one["conv.weight"]) for one in others)
    first, *others = after(resend_every=None)
    assert not all(torch.equal(first["conv.weight"], one["conv.weight"]) for one in others)


def test_ranks_with_unlike_half_types_share_rows(tmp_path: Path) -> None:
    devices = [{"type": "nvidia-t4"}, {"type": "cpu"}]  # fp16, bf16
    asked = request(
        tmp_path, [40, 20], validation_fraction=1500 / 1797, precision="amp", devices=devices
    )
    whole = with_layout(asked, {"out": "rows"}, {"out": [6, 4]})
    first, second = train_in_threads(whole, tmp_path / "rows", state)
    assert all(torch.equal(first[name], value) for name, value in second.items())
    single = asked.job.train.model_copy(update={"precision": "fp32"})
    in_fp32 = asked.model_copy(update={"job": asked.job.model_copy(update={"train": single})})
    exact = alone(in_fp32)
    assert relative_difference(first, exact) <= 2 * relative_difference(alone(asked), exact)


def test_a_token_beyond_the_table_is_an_error_as_in_torch() -> None:
    table = Sharded("table", nn.Embedding(5, 3), Peers("torch"))
    table.cut([(0, 5)], torch.device("cpu"))
    with pytest.raises(IndexError, match="index out of range: table has the rows 0 to 4"):
        table(torch.tensor([1, 7]))


def test_the_square_of_a_tables_gradient() -> None:
    table = nn.Embedding(9, 4)
    factors = Factors(torch.randint(0, 9, (50,)), torch.randn(50, 4))
    (gradient,) = multiply(table, factors)
    assert square(table, factors) == pytest.approx(float(gradient.square().sum()), rel=1e-5)
