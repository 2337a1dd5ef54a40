"""Sizes that depend on the whole step: equal for a traced structure and measured samples."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from trainwright.estimator.predict.step_work import FamilyWork, StepWork, by_family
from trainwright.estimator.structure import Structure
from trainwright.estimator.trace.source import ModelDefinition
from trainwright.estimator.trace.trace import trace
from trainwright.estimator.trace.training_step import TrainingStepSpec

ROWS, WIDTH, PICKED = 500, 16, 6


class _Looked(nn.Module):
    """With `tied`, the output also has the product of the features with the table's rows."""

    def __init__(self, bag: bool, tied: bool) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(ROWS, WIDTH) if bag else nn.Embedding(ROWS, WIDTH)
        self.head = nn.Linear(WIDTH, 3)
        self.tied = tied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.table(x).reshape(len(x), -1, WIDTH).mean(1)
        out: torch.Tensor = self.head(features)
        return out + functional.linear(features, self.table.weight)[:, :3] if self.tied else out


def _traced(
    bag: bool, optimizer: dict[str, Any], batch_size: int, tied: bool = False, accumulation: int = 1
) -> Structure:
    definition = ModelDefinition(
        lambda: _Looked(bag, tied),
        lambda size: (torch.randint(0, ROWS, (size, PICKED)), torch.randint(0, 3, (size,))),
        functional.cross_entropy,
    )
    return trace(
        TrainingStepSpec(definition, {}, None, optimizer, accumulation=accumulation), batch_size
    )


def _zeros(work: dict[str, FamilyWork]) -> list[float]:
    dims = work["elementwise"].dims
    return sorted(one for one in dims["zeros"].tolist() if one) if "zeros" in dims else []


ADAM = {"name": "adam"}


@pytest.mark.parametrize("bag", [False, True])
def test_square_roots_of_a_table_count_the_rows_without_a_lookup_as_zeros(bag: bool) -> None:
    structure = _traced(bag, ADAM, 4)
    for size in (4, 64):
        (zeros,) = _zeros(StepWork(structure)(size))
        assert zeros == pytest.approx(ROWS * WIDTH * math.exp(-size * PICKED / ROWS))
    assert not _zeros(StepWork(_traced(bag, {"name": "momentum"}, 4))(4))


def test_square_roots_have_the_share_of_zeros_as_a_size() -> None:
    dims = StepWork(_traced(False, ADAM, 4))(4)["elementwise"].dims
    assert max(dims["zeros_in_ten"]) == pytest.approx(10 * math.exp(-4 * PICKED / ROWS))


def test_micro_batches_together_look_up_the_rows_of_the_whole_batch() -> None:
    (of_one,), (of_four,) = (
        _zeros(StepWork(_traced(False, ADAM, 8, accumulation=count))(8)) for count in (1, 4)
    )
    assert of_four == pytest.approx(of_one)


def test_a_table_with_another_contribution_to_its_gradient_has_no_zeros() -> None:
    assert not _zeros(StepWork(_traced(False, ADAM, 4, tied=True))(4))
    assert not _zeros(StepWork(_traced(False, {"name": "adam", "weight_decay": 0.1}, 4))(4))


def test_the_predicted_zeros_match_a_random_lookup() -> None:
    torch.manual_seed(0)
    looked_up = torch.zeros(ROWS)
    looked_up[torch.randint(0, ROWS, (64 * PICKED,))] = 1
    (zeros,) = _zeros(StepWork(_traced(False, ADAM, 64))(64))
    assert zeros == pytest.approx(WIDTH * float((looked_up == 0).sum()), rel=0.1)


def test_samples_have_the_same_sizes_as_the_structure_at_any_batch_size() -> None:
    structure = _traced(False, ADAM, 4)
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
    assert max(left["elementwise"].dims["zeros_in_ten"]) > 0
    for family, work in left.items():
        assert work.kinds == right[family].kinds
        assert (
            work.dims.keys() - {"zeros"} == right[family].dims.keys()
        )  # used by calibrations of version 7
        for name, values in right[family].dims.items():
            assert work.dims[name].tolist() == pytest.approx(values.tolist())
