"""A traced structure says where the model can be cut, and which layers are in each unit."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cut_families import FAMILIES
from torch import nn

from trainwright.estimator.structure import Structure
from trainwright.estimator.trace.cuts.model_cuts import cut, cut_step
from trainwright.estimator.trace.source import ModelDefinition
from trainwright.estimator.trace.trace import TrainingStepSpec, trace
from trainwright.tasks.cli.screens import console
from trainwright.tasks.train.pipeline.stage_model import StageModel


def step(build: Callable[[], nn.Module], precision: Any = "fp32") -> TrainingStepSpec:
    definition = ModelDefinition(
        build,
        lambda samples: (torch.zeros(samples, 4), torch.zeros(samples)),
        lambda outputs, targets: outputs.float().sum(),
    )
    return TrainingStepSpec(definition, {}, None, {"name": "sgd"}, precision)


class Net(nn.Module):
    """Layers, and functions and a parameter of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.act, self.two = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6)
        self.encoder = nn.Sequential(
            nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), nn.Linear(6, 2)
        )
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        x = self.act(self.one(x)) * self.scale
        return self.encoder(torch.tanh(self.two(x)).unsqueeze(1))


def test_each_layer_is_in_one_unit_and_the_loss_in_the_last() -> None:
    structure = trace(step(Net), 8)
    layers = [name for one in structure.units for name in one.layers]
    assert sorted(layers) == sorted(one.name for one in structure.layer_work)
    assert structure.units[-1].layers[-1] == "loss"
    units = {one.name: one for one in structure.units}
    assert list(units) == ["one", "two", "encoder.0", "encoder.1"]
    assert units["one"].layers == ["one", "act", "Net"]
    assert "encoder.0.linear1" in units["encoder.0"].layers
    assert units["encoder.0"].dropouts == 4
    assert units["one"].crossing_bytes(3) == 3 * 8 * 4


@pytest.mark.parametrize("precision", ["bf16", "fp64", "amp"])
def test_bytes_that_cross_are_of_the_type_of_the_precision(precision: str) -> None:
    units = cut_step(step(lambda: nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)), precision)).units
    assert units[0].crossing_bytes(1) == 5 * {"bf16": 2, "fp64": 8, "amp": 2}[precision]


@functools.cache
def of_family(family: str) -> Structure:
    """The structure of a family of `cut_families`."""
    build, inputs = FAMILIES[family]
    definition = ModelDefinition(
        build,
        lambda samples: (inputs(samples), torch.zeros(samples)),
        lambda outputs, targets: outputs.sum(),
    )
    return trace(TrainingStepSpec(definition, {}, None, {"name": "sgd"}), 4)


@pytest.mark.parametrize("family", ["U-Net", "encoder and decoder", "DLRM"])
def test_layers_of_real_families_are_divided_among_units(family: str) -> None:
    structure = of_family(family)
    layers = [name for one in structure.units for name in one.layers]
    assert sorted(layers) == sorted(one.name for one in structure.layer_work)
    assert len({one.name for one in structure.units}) == len(structure.units)


@pytest.mark.parametrize(
    ("family", "tied"),
    [
        ("GPT with tied embedding", {"lm_head": ["transformer.wte.weight"]}),
        ("two inputs", {"same:2": ["same.bias", "same.weight"], "frozen": ["scale"]}),
        ("U-Net", {}),
    ],
)
def test_a_unit_names_the_parameters_that_it_shares_with_earlier_units(
    family: str, tied: dict[str, list[str]]
) -> None:
    assert {one.name: one.tied for one in of_family(family).units if one.tied} == tied


@pytest.mark.parametrize("family", ["encoder and decoder", "ConvNeXt", "Swin", "two inputs"])
def test_a_stage_uses_no_trained_parameter_that_its_units_do_not_name(family: str) -> None:
    build, inputs = FAMILIES[family]
    model, structure = build(), of_family(family)
    found = cut(build, inputs)
    owned = {layer.name: layer.parameters for layer in structure.layer_work}
    assert [one.name for one in structure.units] == [one.name for one in found.units]
    for place, unit in enumerate(structure.units):
        named = {*unit.tied, *(name for layer in unit.layers for name in owned[layer])}
        used = StageModel(model, found, place, place + 1).parameters
        assert {name for name, one in used.items() if one.requires_grad} <= named


def shown(structure: Structure) -> str:
    with console.out.capture() as capture:
        console.layers(structure, 3)
    return " ".join(capture.get().split())


def test_extract_says_at_how_many_places_a_model_can_be_cut() -> None:
    says = shown(trace(step(Net), 8))
    assert "cuts into stages 3 places; 24 B to 32 B per sample cross" in says


def test_extract_says_why_a_model_cant_be_cut() -> None:
    class Deciding(Net):
        def forward(self, x):
            return self.two(self.one(x if x.sum() > 0 else -x))

    structure = trace(step(Deciding), 8)
    assert structure.units == []
    assert "Deciding uses bool() of a tensor" in structure.not_cut
    assert f"none: {structure.not_cut}" in shown(structure)


def test_a_structure_without_units_still_loads() -> None:
    document = json.loads(trace(step(Net), 8).model_dump_json())
    del document["units"], document["not_cut"]
    structure = Structure.model_validate(document)
    assert (structure.units, structure.not_cut) == ([], "")
    assert "cuts into stages" not in shown(structure)
