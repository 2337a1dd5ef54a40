"""The table of layers: at any depth, its rows are the model's modules and add up to its totals."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainwright.estimator.structure import Structure
from trainwright.estimator.trace.source import ModelDefinition
from trainwright.estimator.trace.trace import trace
from trainwright.estimator.trace.training_step import TrainingStepSpec
from trainwright.tasks.cli.screens import console
from trainwright.tasks.cli.screens.layer_table import layer_rows


class Block(nn.Module):
    """Two convolutions and a shortcut, with its own scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.short = nn.Conv2d(width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) * self.scale + self.short(x)


@pytest.fixture(scope="module")
def structure() -> Structure:
    definition = ModelDefinition(
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3), Block(8), Block(8), nn.Flatten(), nn.Linear(8 * 36, 10)
        ),
        lambda batch: (torch.rand(batch, 3, 8, 8), torch.zeros(batch, dtype=torch.long)),
        None,
    )
    return trace(TrainingStepSpec(definition, {}, None, {"name": "sgd"}), 4)


@pytest.mark.parametrize("depth", range(5))
def test_the_rows_add_up_at_every_depth(depth: int, structure: Structure) -> None:
    rows = layer_rows(structure, depth)
    assert max(row.depth for row in rows) == min(depth, 3)
    assert sum(row.parameters or 0 for row in rows) == structure.parameters
    assert sum(row.forward_flops or 0 for row in rows) == structure.forward_flops_per_sample * 4


def test_a_child_module_is_listed_below_its_parent_with_its_shape(structure: Structure) -> None:
    rows = layer_rows(structure, 3)
    assert [(row.depth, row.name, row.kind, row.output_shape) for row in rows[:5]] == [
        (0, "Sequential", "Sequential", (4, 10)),
        (1, "0", "Conv2d", (4, 8, 6, 6)),
        (1, "1", "Block", (4, 8, 6, 6)),
        (2, "body", "Sequential", (4, 8, 6, 6)),
        (3, "0", "Conv2d", (4, 8, 6, 6)),
    ]
    assert (rows[2].parameters, rows[3].parameters) == (1, None)


def test_a_structure_of_an_earlier_version_lists_its_layers(structure: Structure) -> None:
    rows = layer_rows(structure.model_copy(update={"modules": []}), 3)
    assert sum(row.parameters or 0 for row in rows) == structure.parameters
    assert len(rows) == len(structure.layers)


@pytest.mark.parametrize("width", [80, 120])
def test_lines_fit_the_screen_and_totals_come_last(
    width: int,
    structure: Structure,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(console.out, "width", width)
    console.layers(structure, 3)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert any(line.split()[:2] == ["parameters", f"{structure.parameters:,}"] for line in lines)
    assert any("Conv2d" in line and "4 x 8 x 6 x 6" in line and "224" in line for line in lines)
