"""What operations need while they run, against what torch's allocator does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from trainwright.estimator.operations import describe
from trainwright.estimator.workspace import workspace_bytes


def _allocated(run: Callable[[], Any]) -> int:
    """Most bytes that torch's allocator gave out during a call beyond what there was before."""
    from torch._C._profiler import _EventType

    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        kept = run()
    assert kept is not None
    changes: list[tuple[int, int]] = []

    def walk(nodes: Any) -> None:
        for node in nodes:
            if node.tag == _EventType.Allocation:
                changes.append((node.start_time_ns, node.extra_fields.alloc_size))
            walk(node.children)

    walk(seen.profiler.kineto_results.experimental_event_tree())
    live = most = 0
    for _, size in sorted(changes, key=lambda change: change[0]):
        live += size
        most = max(most, live)
    return most


def _size(*tensors: Any) -> int:
    return sum(one.numel() * one.element_size() for one in tensors if one is not None)


@pytest.mark.parametrize(
    ("batch", "channels", "filters", "side", "kernel"),
    [(32, 16, 16, 16, 3), (32, 3, 16, 32, 3), (8, 64, 128, 16, 1), (16, 32, 48, 24, 5)],
)  # fmt: skip
def test_convolutions_need_what_onednn_copies(batch: int, channels: int, filters: int, side: int, kernel: int) -> None:
    images, weight = torch.rand(batch, channels, side, side), torch.rand(filters, channels, kernel, kernel)
    pad = [kernel // 2] * 2
    forward = (images, weight, None, [1, 1], pad, [1, 1], False, [0, 0], 1)
    out = torch.ops.aten.convolution(*forward)
    backward = (
        torch.rand_like(out),
        images,
        weight,
        [filters],
        [1, 1],
        pad,
        [1, 1],
        False,
        [0, 0],
        1,
        [True, True, True],
    )
    for func, args in (
        (torch.ops.aten.convolution.default, forward),
        (torch.ops.aten.convolution_backward.default, backward),
    ):
        made = func(*args)
        results = made if isinstance(made, tuple) else (made,)
        seen = describe(func, args, {}, made)
        expected = _size(*results) + workspace_bytes(seen.family, seen.kind, seen.dtype, seen.dims | seen.layout)
        assert expected == pytest.approx(_allocated(lambda func=func, args=args: func(*args)), rel=0.05)


@pytest.mark.parametrize(
    ("steps", "batch", "inputs", "hidden"), [(20, 32, 64, 128), (30, 8, 64, 200), (10, 16, 256, 64)]
)
def test_recurrent_layers_need_packed_weights_and_gates(steps: int, batch: int, inputs: int, hidden: int) -> None:
    layer = torch.nn.LSTM(inputs, hidden)
    weights = [one.detach() for one in layer.parameters()]
    args = (
        torch.rand(steps, batch, inputs), *weights, torch.zeros(batch, hidden), torch.zeros(batch, hidden), False, [], 2,
        hidden, 1, True, False, False, True,
    )  # fmt: skip
    func = torch.ops.aten.mkldnn_rnn_layer.default
    made = func(*args)
    seen = describe(func, args, {}, made)
    expected = _size(*made) + workspace_bytes(seen.family, seen.kind, seen.dtype, seen.dims | seen.layout)
    assert expected == pytest.approx(_allocated(lambda: func(*args)), rel=0.05)


def test_other_operations_need_nothing_more() -> None:
    assert workspace_bytes("elementwise", "aten.add", "float32", {"given": 1e6}) == 0.0
