"""The most expensive baseline: the sum of a step's operations, each timed alone.

Operations are distinct by kind, shapes, dtypes, strides and other arguments. The model must run
once on the device. The sum omits the effect of operations on one another's caches, and the costs of
autograd and Python.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from trainwright.estimator.trace.training_step import TrainingStep

_LEAST_S = 0.002
_MOST_RUNS = 20


class _Calls(TorchDispatchMode):
    """Counts the calls of a step, and keeps the first of equal ones with copies of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()
        self.first: dict[Any, tuple[Any, Any, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        key = (func, *(_described(one) for one in tree_leaves((args, kwargs))))
        self.counts[key] += 1
        if key not in self.first:
            self.first[key] = (func, *tree_map(_copied, (args, kwargs)))
        return func(*args, **kwargs)


def _described(one: Any) -> Any:
    if isinstance(one, torch.Tensor):
        return (
            tuple(one.shape),
            one.dtype,
            one.stride() if one.layout is torch.strided else one.layout,
        )
    return repr(one)


def _copied(one: Any) -> Any:
    """A copy with the same layout and values, because indices must stay in range."""
    if not isinstance(one, torch.Tensor):
        return one
    if (
        one.layout is not torch.strided or 0 in one.stride()
    ):  # opaque, or expanded: a copy would have another layout
        return one.detach()
    return torch.empty_strided(one.shape, one.stride(), dtype=one.dtype).copy_(one.detach())


def replay(step: TrainingStep) -> float:
    """Seconds of a step: Σ count · the median of the operation alone."""
    step()  # creates the optimizer's state
    calls = _Calls()
    with calls:
        step()
    with torch.no_grad():
        return sum(calls.counts[key] * _seconds(*call) for key, call in calls.first.items())


def _seconds(func: Any, args: Any, kwargs: Any) -> float:
    seen: list[float] = []
    func(*args, **kwargs)
    while len(seen) < 3 or (sum(seen) < _LEAST_S and len(seen) < _MOST_RUNS):
        started = time.perf_counter()
        func(*args, **kwargs)
        seen.append(time.perf_counter() - started)
    return statistics.median(seen)
