"""Stages that run one after another compute what the whole model does, bit for bit."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from cut_families import FAMILIES, cut_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from trainwright.estimator.trace.cuts.model_cuts import CutModel, cut
from trainwright.tasks.errors import BadInput
from trainwright.tasks.train.passes import keyed_dropout
from trainwright.tasks.train.pipeline.stage_model import (
    MicroBatchPass,
    StageModel,
    packed,
    unpacked,
)

STEP = (7, 3)
"""Seed and step of the masks of dropout."""


pytestmark = pytest.mark.usefixtures("doubles")


def wanted(value: Any) -> Any:
    """Inputs of floating-point numbers, with gradients."""
    return tree_map(
        lambda one: one.clone().requires_grad_() if one.is_floating_point() else one, value
    )


def gradients(outputs: Any) -> list[torch.Tensor]:
    """Some gradient for each output that has one."""
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randn(one.shape, generator=generator)
        for one in tree_flatten(outputs)[0]
        if one.requires_grad
    ]


def of_whole(model: nn.Module, inputs: Any, samples: int, first: int) -> tuple[Any, Any]:
    """Outputs and inputs of the whole model, after the backward pass."""
    inputs = wanted(inputs)
    torch.manual_seed(11)
    keyed_dropout.begin_pass(*STEP, first, samples)
    outputs = model(inputs)
    made = [one for one in tree_flatten(outputs)[0] if one.requires_grad]
    if made:
        torch.autograd.backward(made, gradients(outputs))
    keyed_dropout.end_pass()
    return outputs, inputs


def of_stages(stages: list[StageModel], inputs: Any, samples: int, first: int) -> tuple[Any, Any]:
    """The same of stages that send each other tensors."""
    values = inputs = wanted(inputs)
    torch.manual_seed(11)
    passes: list[MicroBatchPass] = []
    for stage in stages:
        if not stage.is_first:
            values = [
                unpacked(packed(one, facts).flatten(), facts, samples).requires_grad_(
                    one.requires_grad  # also an input that crosses
                )
                for one, facts in zip(values, stage.receives, strict=True)
            ]
        keyed_dropout.begin_pass(*STEP, first, samples, stage.first_dropout)
        passes.append(MicroBatchPass(stage, values, samples))
        values = passes[-1].outputs
    coming = iter(gradients(values))
    back = [next(coming) if one.requires_grad else None for one in tree_flatten(values)[0]]
    for one in reversed(passes):
        back = one.backward(back)
    keyed_dropout.end_pass()
    return values, inputs


def stages_of(model: nn.Module, found: CutModel, places: list[int]) -> list[StageModel]:
    """Stages that end at these units."""
    ends = [0, *places, len(found.units)]
    return [StageModel(model, found, one, two) for one, two in itertools.pairwise(ends)]


def same(one: Any, two: Any) -> bool:
    left, right = tree_flatten(one), tree_flatten(two)
    return left[1] == right[1] and all(
        torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(left[0], right[0], strict=True)
    )


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_any_cut_computes_what_the_whole_model_does_bit_for_bit(
    family: str, data: st.DataObject
) -> None:
    original, found = cut_model(family)
    assert found.not_cut == ""
    count = len(found.units)
    chosen = data.draw(st.sets(st.integers(1, count - 1), min_size=1), label="units that begin")
    samples, first = data.draw(st.integers(2, 5)), data.draw(st.integers(0, 9))
    whole, parts = copy.deepcopy(original).train(), copy.deepcopy(original).train()
    torch.manual_seed(samples)
    inputs = FAMILIES[family][1](samples)
    stages = stages_of(parts, found, sorted(chosen))

    outputs, given_ = of_whole(whole, inputs, samples, first)
    staged, taken = of_stages(stages, inputs, samples, first)
    assert same(outputs, staged)
    grads = tree_map(lambda one: one.grad, given_), tree_map(lambda one: one.grad, taken)
    assert same(*grads)
    assert same(
        {name: one.grad for name, one in whole.named_parameters()},
        {name: one.grad for name, one in parts.named_parameters()},
    )
    assert same(dict(whole.named_buffers()), dict(parts.named_buffers()))

    whole.eval(), parts.eval()
    with torch.no_grad():
        outputs, _ = of_whole(whole, inputs, samples, first)
        staged, _ = of_stages(stages, inputs, samples, first)
    assert same(outputs, staged)


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_of_single_units_hold_every_parameter_and_say_what_they_send(family: str) -> None:
    original, found = cut_model(family)
    model = copy.deepcopy(original).train()
    stages = stages_of(model, found, list(range(1, len(found.units))))
    held = [set(stage.parameters) for stage in stages]
    assert set().union(*held) == {name for name, _ in model.named_parameters()}
    assert set().union(*(stage.buffers for stage in stages)) == dict(model.named_buffers()).keys()
    values: Any = FAMILIES[family][1](4)
    for stage in stages[:-1]:
        values = stage(values, 4)
        unit = stage.units[-1]
        assert [one.shape_of(4) for one in stage.sends] == [tuple(one.shape) for one in values]
        assert [one.dtype for one in stage.sends] == [one.dtype for one in values]
        assert [one.gradient for one in stage.sends] == [one.requires_grad for one in values]
        assert unit.crossing_bytes(4) == sum(one.nbytes for one in values)


def test_inputs_of_another_shape_than_the_model_was_cut_with_are_bad_input() -> None:
    model, found = cut_model("GPT with tied embedding")
    stage = StageModel(model, found, 0, 2)
    with pytest.raises(BadInput, match=r"got inputs of shape \(3, 9\) for 3 samples; .*\(3, 7\)"):
        stage(torch.zeros(3, 9, dtype=torch.int64), 3)


def test_inputs_in_a_dict_are_taken_by_their_keys() -> None:
    model, found = cut_model("BERT")
    stage = StageModel(model.eval(), found, 0, len(found.units))
    batch = FAMILIES["BERT"][1](4)
    with torch.no_grad():
        own = stage(batch, 4)
        assert same(stage(dict(reversed(batch.items())), 4), own)


def test_a_stage_without_units_of_the_model_is_refused() -> None:
    model, found = cut_model("DLRM")
    for first, end in ((0, 0), (2, 1), (0, len(found.units) + 1)):
        with pytest.raises(ValueError, match=r"units \["):
            StageModel(model, found, first, end)


def test_stages_compute_in_mixed_precision_what_the_model_does() -> None:
    torch.set_default_dtype(torch.float32)
    build, inputs = FAMILIES["BERT"]
    found = cut(build, inputs, lambda: torch.autocast("cpu", torch.bfloat16))
    assert found.graphs[True].facts[found.graphs[True].outputs.refs()[0]].dtype == torch.bfloat16
    torch.manual_seed(4)
    whole = build()
    parts, batch = copy.deepcopy(whole), inputs(3)
    with torch.autocast("cpu", torch.bfloat16):
        outputs, _ = of_whole(whole, batch, 3, 0)
        staged, _ = of_stages(stages_of(parts, found, [5, 11]), batch, 3, 0)
    assert same(outputs, staged)
    assert same(
        {name: one.grad for name, one in whole.named_parameters()},
        {name: one.grad for name, one in parts.named_parameters()},
    )


def test_hooks_and_modes_of_modules_count_when_stages_run() -> None:
    """Also those that are changed after the model was cut."""
    original, found = cut_model("ViT")
    model, seen = copy.deepcopy(original).train(), list[str]()
    model.norm.register_forward_hook(lambda module, args, out: seen.append("norm"))
    model.encoder.layers[1].eval()
    whole = copy.deepcopy(model)
    batch = FAMILIES["ViT"][1](2)
    outputs, _ = of_whole(whole, batch, 2, 0)
    seen.clear()
    stages = stages_of(model, found, [2, 4])
    torch.manual_seed(11)
    values: Any = batch
    for stage in stages:
        values = stage(values, 2)
    assert seen == ["norm"]
    assert values.shape == outputs.shape
    model.eval(), whole.eval()
    with torch.no_grad():
        assert same(of_whole(whole, batch, 2, 0)[0], of_stages(stages, batch, 2, 0)[0])
