"""What a step tells of its operations' sizes: alike for a structure that was traced and for samples that were measured."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from trainwright.estimator.source import ModelDefinition
from trainwright.estimator.structure import Structure
from trainwright.estimator.trace import trace
from trainwright.estimator.training_step import StepSpec
from trainwright.estimator.work import StepWork, Work, by_family

ROWS, WIDTH, PICKED = 500, 16, 6


class _Looked(nn.Module):
    def __init__(self, bag: bool) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(ROWS, WIDTH) if bag else nn.Embedding(ROWS, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.table(x).reshape(len(x), -1, WIDTH).mean(1))
        return out


def _traced(bag: bool, optimizer: str, batch_size: int) -> Structure:
    definition = ModelDefinition(
        lambda: _Looked(bag),
        lambda size: (torch.randint(0, ROWS, (size, PICKED)), torch.randint(0, 3, (size,))),
        functional.cross_entropy,
    )
    return trace(StepSpec(definition, {}, None, {"name": optimizer}), batch_size)


def _zeros(work: dict[str, Work]) -> list[float]:
    dims = work["elementwise"].dims
    return sorted(one for one in dims["zeros"].tolist() if one) if "zeros" in dims else []


def test_roots_of_a_table_are_of_zeros_in_the_rows_that_no_sample_looks_up() -> None:
    for bag in (False, True):
        structure = _traced(bag, "adam", 4)
        for size in (4, 64):
            (zeros,) = _zeros(StepWork(structure)(size))
            assert zeros == ROWS * WIDTH * math.exp(-size * PICKED / ROWS)
        assert not _zeros(StepWork(_traced(bag, "momentum", 4))(4))


def test_samples_tell_the_same_sizes_as_the_structure() -> None:
    structure = _traced(False, "adam", 8)
    rows = [
        (
            one.family,
            one.kind,
            one.count,
            one.flops(8),
            one.bytes(8),
            {name: line(8) for name, line in one.dims.items()},
        )
        for one in structure.trace
    ]
    left, right = StepWork(structure)(8), by_family(rows)
    assert left.keys() == right.keys()
    assert _zeros(left) == _zeros(right) != []
    for family, work in left.items():
        assert work.kinds == right[family].kinds
        for name, values in right[family].dims.items():
            assert work.dims[name].tolist() == values.tolist()
