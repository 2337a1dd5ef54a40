"""Gradients are sent in chunks of any size: sums are the same, and chunks are those of the plan."""

from __future__ import annotations

import copy
import itertools
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trainwright.estimator.structure import LayerFacts
from trainwright.tasks.allocate.actions.chunks import chunks_of
from trainwright.tasks.errors import TrainingFailed
from trainwright.tasks.runs.artefacts.layout import Layout, Pipeline, Stage
from trainwright.tasks.train.exchange.group_exchange import Exchange
from trainwright.tasks.train.layouts.gradients import GradientSum
from trainwright.tasks.train.layouts.layout_work import LayoutWork


class Doubled:
    """A collective of two ranks that always have the same tensors; notes when sums start."""

    rank, size, wait_s = 0, 2, 0.0

    def __init__(self) -> None:
        self.begun: list[tuple[str, int]] = []
        self.finished: list[str] = []
        self.at: list[int] = []
        """how many layers' backward passes had come before each sum"""
        self.passed = 0

    def start_sum(self, tensor: torch.Tensor, name: str) -> Any:
        self.begun.append((name, tensor.numel()))
        self.at.append(self.passed)
        return tensor, name

    def finish(self, handle: Any) -> None:
        tensor, name = handle
        tensor.mul_(2)
        self.finished.append(name)


def passes(model: nn.Module, gradients: GradientSum, rows: torch.Tensor, micro: int = 1) -> None:
    """One step, in micro-batches."""
    gradients.begin()
    parts = rows.split(-(-len(rows) // micro))
    for number, part in enumerate(parts):
        gradients.last = number == len(parts) - 1
        (model(part).square().sum() / 2).backward()
    gradients.send_rest()
    gradients.finish([1.0] * len(gradients.used))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=5),
    st.integers(1, 300),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.integers(1, 3),
)
def test_chunks_of_any_size_give_the_same_gradients(
    widths: list[int], most: int, dtype: torch.dtype, micro: int
) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(one, two) for one, two in itertools.pairwise(widths)]
    whole, rows = nn.Sequential(*layers).to(dtype), torch.randn(6, widths[0], dtype=dtype)
    found = []
    for chunk_bytes in (most, 1 << 30):
        one, model = Doubled(), copy.deepcopy(whole)
        gradients = GradientSum(model.parameters(), one, chunk_bytes)  # type: ignore[arg-type]
        passes(model, gradients, rows, micro)
        found.append([each.grad.clone() for each in model.parameters() if each.grad is not None])
        assert one.finished == [name for name, _ in one.begun]
        square = sum(float(each.double().square().sum()) for each in found[-1])
        assert gradients.joint_square() == pytest.approx(square, rel=0.05)
        assert gradients.own_square == pytest.approx(square / 4, rel=0.05)
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))
    assert len(found[0]) == 2 * len(layers)


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=3), min_size=1, max_size=8),
    st.integers(1, 80),
)
def test_a_rank_sends_the_chunks_that_are_planned(sizes: list[list[int]], most: int) -> None:
    layers = [
        LayerFacts(
            name=str(number),
            kind="any",
            parameters={f"{number}.{place}": size for place, size in enumerate(own)},
        )
        for number, own in enumerate(sizes)
    ]
    parameters = [nn.Parameter(torch.ones(size)) for own in sizes for size in own]
    one = Doubled()
    gradients = GradientSum(parameters, one, 4 * most)  # type: ignore[arg-type]
    gradients.begin()
    torch.stack([each.sum() for each in parameters]).sum().backward()
    gradients.send_rest()
    assert [count for _, count in one.begun] == [each.elements for each in chunks_of(layers, most)]


class Noted(torch.autograd.Function):
    """Counts the backward passes that come to it."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, one: Doubled) -> torch.Tensor:
        ctx.one = one
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.one.passed += 1
        return gradients[0], None


def test_a_large_layer_leaves_in_several_chunks_while_the_backward_pass_goes_on() -> None:
    layers, one = [nn.Linear(8, 8, bias=False) for _ in range(4)], Doubled()
    model = nn.ModuleList(layers)
    gradients = GradientSum(model.parameters(), one, 4 * 32)  # type: ignore[arg-type]
    gradients.begin()
    rows = torch.randn(3, 8, requires_grad=True)
    for layer in layers:
        rows = layer(Noted.apply(rows, one))  # type: ignore[no-untyped-call]
    rows.sum().backward()
    gradients.send_rest()
    # Two chunks of each layer, as soon as its own backward pass has ended.
    assert [count for _, count in one.begun] == [32] * 8
    assert one.at[0::2] == one.at[1::2]
    assert one.at[-1] >= 3 > one.at[0]
    assert one.at == sorted(one.at)


def test_parameters_without_a_gradient_or_without_elements_are_sent_as_zeros() -> None:
    used, unused = nn.Linear(3, 2), nn.Linear(2, 2)
    empty = nn.Parameter(torch.zeros(0, 4))
    parameters, one = [*unused.parameters(), empty, *used.parameters()], Doubled()
    gradients = GradientSum(parameters, one, 16)  # type: ignore[arg-type]
    gradients.begin()
    used(torch.ones(1, 3)).sum().backward()
    gradients.send_rest()
    assert gradients.used == [1.0, 1.0, 0.0, 0.0, 0.0]
    gradients.finish(gradients.used)
    assert unused.weight.grad is None
    assert torch.equal(used.bias.grad, torch.full((2,), 2.0))
    assert sum(count for _, count in one.begun) == 6 + 2 + 4 + 2


def test_a_gradient_that_comes_in_parts_after_its_chunk_has_left_is_refused() -> None:
    parameter, one = nn.Parameter(torch.ones(4)), Doubled()
    gradients = GradientSum([parameter], one, 8)  # type: ignore[arg-type]
    gradients.begin()
    parameter.sum().backward()
    with pytest.raises(TrainingFailed, match="receives its gradient in several parts"):
        parameter.sum().backward()


class Backwards(nn.Module):
    """Defines its layers in another order than it uses them."""

    def __init__(self, one: Doubled) -> None:
        super().__init__()
        self.last, self.first, self.one = nn.Linear(8, 4), nn.Linear(4, 8), one

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(Noted.apply(self.first(rows), self.one))  # type: ignore[no-untyped-call]
        return found


@pytest.mark.parametrize("known", [True, False])
def test_chunks_follow_the_backward_pass_whatever_order_the_model_defines(known: bool) -> None:
    one = Doubled()
    model = Backwards(one)
    layers = [
        LayerFacts(
            name=name, kind="Linear", parameters={f"{name}.weight": 32, f"{name}.bias": size}
        )
        for name, size in (("first", 8), ("last", 4))
    ]
    pipeline = Pipeline(micro_batches=[2], stages=[Stage(device="d", layers=["Backwards"])])
    exchange = cast(Exchange, one)
    work = LayoutWork(Layout(pipelines=[pipeline]), layers if known else [], model, exchange)
    passes(model, GradientSum(work.summed, exchange, 4 * 36), torch.randn(2, 4))
    # The gradients of `last` leave before the backward pass comes to `first`.
    assert one.at == ([0, 1, 1] if known else [1, 1, 1])


def test_sums_start_when_only_later_gradients_of_others_are_missing() -> None:
    norm, first, second = nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4)
    one = Doubled()
    parameters = [*first.parameters(), *norm.parameters(), *second.parameters()]
    gradients = GradientSum(parameters, one, 16)  # type: ignore[arg-type]
    gradients.begin()
    gradients.last = False
    second(norm(first(torch.randn(3, 4)))).sum().backward()
    later = [*first.parameters(), *second.parameters()]
    gradients.last = True
    gradients.backward_ended({id(each) for each in later})
    assert one.begun == []
    for number, each in enumerate(reversed(later)):
        one.passed = number + 1
        gradients.arrived(each)
    assert {*one.at} == {1, 2, 3, 4}
    assert gradients.is_sent()


def test_a_single_chunk_leaves_early_if_other_sums_wait_for_it() -> None:
    for others_wait in (False, True):
        one, model = Doubled(), nn.Linear(2, 2)
        gradients = GradientSum(model.parameters(), one, others_wait=others_wait)  # type: ignore[arg-type]
        gradients.begin()
        model(torch.randn(1, 2)).sum().backward()
        assert gradients.is_sent() == others_wait
