"""The optimizers do what torch's plain loops do, whatever the parameters' type and layout."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.estimator.optimizers import make_optimizer

PLAIN: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.02, foreach=False),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, weight_decay=0.02, foreach=False),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.02, foreach=False),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.02, foreach=False),
}
DTYPES = {"fp64": (torch.float64, 1e-12), "fp32": (torch.float32, 1e-5), "bf16": (torch.bfloat16, 0.0)}


def stepped(make: Any, first: list[torch.Tensor], steps: int) -> list[torch.Tensor]:
    """The parameters after steps with gradients that lie as those of a bucket do: row by row, at any place."""
    parameters = [torch.nn.Parameter(one.clone()) for one in first]
    optimizer, chance = make(parameters), torch.Generator().manual_seed(7)
    counts = [one.numel() for one in first]
    for _ in range(steps):
        flat = torch.randn(1 + sum(counts), generator=chance).to(first[0].dtype)[1:]
        for one, part in zip(parameters, flat.split(counts), strict=True):
            one.grad = part.view(one.shape)
        optimizer.step()
    return [one.detach() for one in parameters]


@settings(max_examples=20, deadline=None)
@given(
    name=st.sampled_from(sorted(PLAIN)), kind=st.sampled_from(sorted(DTYPES)), steps=st.integers(1, 6),
    sizes=st.lists(st.integers(1, 70), min_size=1, max_size=4), channels_last=st.booleans(),
)  # fmt: skip
def test_a_step_is_that_of_the_plain_loop(
    name: str, kind: str, steps: int, sizes: list[int], channels_last: bool
) -> None:
    dtype, most = DTYPES[kind]
    chance = torch.Generator().manual_seed(1)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    first = [torch.randn(size, 3, 2, 2, generator=chance).to(dtype, memory_format=layout) for size in sizes]
    ours = stepped(
        lambda given: make_optimizer(given, name, learning_rate=0.1, momentum=0.8, weight_decay=0.02), first, steps
    )
    for one, other in zip(ours, stepped(PLAIN[name], first, steps), strict=True):
        assert torch.allclose(one, other, rtol=most, atol=most)


@pytest.mark.parametrize("name", sorted(PLAIN))
def test_what_the_loop_has_kept_is_taken_up(name: str) -> None:
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, 50, dtype=torch.float64))
    other = torch.nn.Parameter(parameter.detach().clone())
    plain = PLAIN[name]([parameter])
    ours = make_optimizer([other], name, learning_rate=0.1, momentum=0.8, weight_decay=0.02)
    for step in range(6):
        if step == 3:  # a checkpoint's state, from the one to the other
            kept = copy.deepcopy(plain.state_dict()["state"])
            ours.load_state_dict({"state": kept, "param_groups": ours.state_dict()["param_groups"]})
            other.data.copy_(parameter.data)
        for one, rule in ((parameter, plain), (other, ours)):
            one.grad = torch.cos(one.detach() * (step + 1))
            rule.step()
    assert torch.allclose(parameter, other, rtol=1e-12, atol=1e-12)
