"""Weight gradients that are made after the backward pass are those that autograd makes in it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from trainwright.tasks.train.pipeline.deferred_weights import DeferredWeights

CASES: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)), (4, 5)),
    "without bias, of sequences": (nn.Linear(5, 3, bias=False), (2, 6, 5)),
    "convolutions": (
        nn.Sequential(
            nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2), nn.ReLU(), nn.Conv2d(8, 3, 1)
        ),
        (3, 4, 9, 8),
    ),
    "dilated": (nn.Conv1d(3, 5, 3, dilation=2, bias=False), (2, 3, 12)),
    "of volumes": (nn.Conv3d(2, 3, 2), (2, 2, 4, 5, 3)),
    "not deferred": (
        nn.Sequential(nn.Conv2d(2, 3, 3, padding="same"), nn.BatchNorm2d(3)),
        (3, 2, 5, 5),
    ),
}


MADE_WEIGHTS = {
    "weight_norm": nn.utils.weight_norm(nn.Linear(5, 3)),
    "spectral_norm": nn.utils.spectral_norm(nn.Conv1d(3, 5, 3)),
    "pruned": prune.l1_unstructured(nn.Linear(5, 3), "weight", 0.5),
}


@pytest.mark.parametrize("name", MADE_WEIGHTS)
def test_a_weight_that_is_made_of_other_parameters_is_left_to_autograd(name: str) -> None:
    assert DeferredWeights({"": MADE_WEIGHTS[name]}, lambda _: None).modules == []


def test_a_deferred_module_takes_its_input_by_name() -> None:
    layer, rows = nn.Linear(2, 2), torch.randn(3, 2)
    expected = layer(rows)
    DeferredWeights({"": layer}, lambda _: None)
    assert torch.equal(layer(input=rows), expected)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("calls", [1, 2])
def test_gradients_are_those_of_the_whole_backward_pass(name: str, calls: int) -> None:
    torch.manual_seed(0)
    model, shape = CASES[name]
    model = copy.deepcopy(model).double()
    twin = copy.deepcopy(model)
    inputs = [torch.randn(shape, dtype=torch.float64) for _ in range(calls * 2)]
    arrived: list[int] = []
    deferred = DeferredWeights(
        dict(model.named_modules()), lambda parameter: arrived.append(id(parameter))
    )
    for number in range(2):  # two micro-batches in flight
        deferred.micro_batch = number
        for one in inputs[number * calls : (number + 1) * calls]:
            own, other = one.clone().requires_grad_(), one.clone().requires_grad_()
            model(own).square().sum().backward()
            twin(other).square().sum().backward()
            assert torch.equal(own.grad, other.grad) or torch.allclose(
                own.grad, other.grad, rtol=1e-13
            )
    waiting = {id(one) for module in deferred.modules for one in module.parameters()}
    assert all(one.grad is None for one in model.parameters() if id(one) in waiting)
    for number in range(2):
        deferred.finish(number)
    assert sorted(arrived) == sorted(2 * [*waiting])
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        assert one.grad is not None
        assert two.grad is not None
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-12, atol=1e-13)


def test_tied_frozen_and_replaced_modules_are_left_to_autograd() -> None:
    first, second, third, plain = (nn.Linear(3, 3) for _ in range(4))
    second.weight = first.weight
    third.weight.requires_grad_(requires_grad=False)
    plain.forward = plain.forward  # type: ignore[method-assign]
    modules = {"first": first, "second": second, "third": third, "plain": plain}
    deferred = DeferredWeights(modules, lambda _: None)
    assert deferred.modules == [third]
    third(torch.randn(2, 3, requires_grad=True)).sum().backward()
    assert third.bias.grad is not None


def test_released_modules_run_their_own_code() -> None:
    layer = nn.Linear(2, 2)
    deferred = DeferredWeights({"layer": layer}, lambda _: None)
    deferred.release()
    layer(torch.randn(1, 2)).sum().backward()
    assert layer.weight.grad is not None


def test_an_output_that_is_joined_to_others_has_its_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 4).double()
    twin = copy.deepcopy(model)
    rows = torch.randn(5, 3, dtype=torch.float64)
    others = torch.randn(5, 60, dtype=torch.float64)
    weights = torch.randn(5, 64, dtype=torch.float64)
    deferred = DeferredWeights({"": model}, lambda _: None)
    for one in (model, twin):
        (torch.cat([others, one(rows)], 1) * weights).sum().backward()
    assert model.weight.grad is None
    deferred.finish(0)
    torch.testing.assert_close(model.weight.grad, twin.weight.grad, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(model.bias.grad, twin.bias.grad, rtol=1e-12, atol=1e-13)
