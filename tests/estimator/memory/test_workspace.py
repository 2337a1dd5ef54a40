"""The predicted workspace of operations, compared with torch's allocator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from trainwright.estimator.memory.workspace import workspace_bytes
from trainwright.estimator.trace.operations import describe


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Which convolutions torch gives to oneDNN depends on whether there are several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _allocated(run: Callable[[], Any]) -> int:
    """The most bytes that torch's allocator held during a call, beyond those before it."""
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
)
def test_convolutions_need_workspace_for_onednns_copies(
    batch: int, channels: int, filters: int, side: int, kernel: int
) -> None:
    images, weight = (
        torch.rand(batch, channels, side, side),
        torch.rand(filters, channels, kernel, kernel),
    )
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
        expected = _size(*results) + workspace_bytes(
            seen.family, seen.dtype, seen.dims | seen.layout
        )
        assert expected == pytest.approx(
            _allocated(lambda func=func, args=args: func(*args)), rel=0.05
        )


@pytest.mark.parametrize(
    ("steps", "batch", "inputs", "hidden"), [(20, 32, 64, 128), (30, 8, 64, 200), (10, 16, 256, 64)]
)
def test_recurrent_layers_need_workspace_for_packed_weights_and_gates(
    steps: int, batch: int, inputs: int, hidden: int
) -> None:
    layer = torch.nn.LSTM(inputs, hidden)
    weights = [one.detach() for one in layer.parameters()]
    args = (
        torch.rand(steps, batch, inputs),
        *weights,
        torch.zeros(batch, hidden),
        torch.zeros(batch, hidden),
        False,
        [],
        2,
        hidden,
        1,
        True,
        False,
        False,
        True,
    )
    func = torch.ops.aten.mkldnn_rnn_layer.default
    made = func(*args)
    seen = describe(func, args, {}, made)
    expected = _size(*made) + workspace_bytes(seen.family, seen.dtype, seen.dims | seen.layout)
    assert expected == pytest.approx(_allocated(lambda: func(*args)), rel=0.05)


def _channels_last(*shape: int) -> torch.Tensor:
    return torch.rand(shape).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("images", "gradient_last", "weight", "stride", "transposed", "groups"),
    [
        (
            torch.rand(8, 64, 32, 32),
            False,
            (128, 64, 3, 3),
            2,
            False,
            1,
        ),  # the images' gradient gets another layout
        (
            torch.rand(8, 48, 32, 32),
            True,
            (48, 48, 3, 3),
            1,
            False,
            1,
        ),  # so does a gradient with channels last
        (_channels_last(8, 48, 32, 32), False, (48, 48, 3, 3), 1, False, 1),
        (_channels_last(8, 48, 32, 32), True, (48, 1, 3, 3), 1, False, 48),
        (torch.rand(8, 48, 16, 16), True, (48, 1, 7, 7), 1, False, 48),
        (torch.rand(16, 32, 32, 32), False, (32, 64, 2, 2), 2, True, 1),  # upwards
        (
            torch.rand(8, 64, 32, 32),
            True,
            (32, 64, 1, 1),
            1,
            False,
            1,
        ),  # by torch itself, as a product
        (
            torch.rand(1, 16, 32, 32),
            False,
            (32, 16, 3, 3),
            1,
            False,
            1,
        ),  # by torch itself, through columns
    ],
)
def test_the_layout_determines_a_convolutions_workspace(
    images: torch.Tensor,
    gradient_last: bool,
    weight: tuple[int, ...],
    stride: int,
    transposed: bool,
    groups: int,
) -> None:
    filters = torch.rand(weight)
    pad = [0, 0] if transposed else [weight[-1] // 2] * 2
    rest = ([stride] * 2, pad, [1, 1], transposed, [0, 0], groups)
    forward = (images, filters, None, *rest)
    out = torch.ops.aten.convolution(*forward)
    layout = torch.channels_last if gradient_last else torch.contiguous_format
    gradient = torch.rand_like(out).contiguous(memory_format=layout)
    backward = (gradient, images, filters, None, *rest, [True, True, False])
    for func, args in (
        (torch.ops.aten.convolution.default, forward),
        (torch.ops.aten.convolution_backward.default, backward),
    ):
        made = func(*args)
        results = made if isinstance(made, tuple) else (made,)
        seen = describe(func, args, {}, made)
        expected = _size(*results) + workspace_bytes(
            seen.family, seen.dtype, seen.dims | seen.layout
        )
        assert expected == pytest.approx(
            _allocated(lambda func=func, args=args: func(*args)), rel=0.05
        )


def test_other_operations_need_no_workspace() -> None:
    assert workspace_bytes("elementwise", "float32", {"given": 1e6}) == 0.0
