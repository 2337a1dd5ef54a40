"""Builds models with fake tensors, which allocate no memory. Loads torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch  # noqa: TID253 - this is a separate process
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily  # noqa: TID253
from torch.overrides import TorchFunctionMode  # noqa: TID253
from torch.utils._pytree import tree_leaves  # noqa: TID253


class RealConstants(TorchFunctionMode):
    """Keeps small tables, and values computed from them, as real tensors among the fake ones.

    Models make such tables while they are built, and read their values.
    """

    _MADE_BY = (torch.arange, torch.linspace, torch.logspace, torch.tensor)
    _SMALL = 100_000

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        real = all(not isinstance(one, FakeTensor) and one.numel() <= self._SMALL for one in given)
        if func in self._MADE_BY or (given and real):
            with unset_fake_temporarily():
                made = func(*args, **kwargs)
            if not isinstance(made, torch.Tensor) or made.numel() <= self._SMALL:
                return made
        return func(*args, **kwargs)


@contextlib.contextmanager
def quiet_initialisers() -> Iterator[None]:
    """Disables torch.nn.init: fake tensors have no values, and some initialisers read them."""
    kept: dict[str, Callable[..., Any]] = {}
    for name in dir(torch.nn.init):
        function = getattr(torch.nn.init, name)
        if name.endswith("_") and not name.startswith("_") and callable(function):
            kept[name] = function
            setattr(torch.nn.init, name, lambda tensor, *_, **__: tensor)
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(torch.nn.init, name, function)
