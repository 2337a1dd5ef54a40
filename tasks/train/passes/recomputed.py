"""Modules whose forward pass is done again in the backward pass, to save memory.

By `torch.utils.checkpoint`, without reentrant autograd. The second pass computes what the first one
did: with the buffers and the random numbers from before it, and with the sums of the joint batch
that its normalisations got. It leaves the buffers as the first pass left them, so that running
statistics are updated once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch  # noqa: TID253 - only ranks import this
from torch import nn  # noqa: TID253
from torch.utils.checkpoint import checkpoint  # noqa: TID253

from trainwright.tasks.errors import BadInput
from trainwright.tasks.train.layouts.batch_norm import JointForward, is_batch_norm
from trainwright.tasks.train.passes import keyed_dropout


class Recomputed:
    """Replaces a module's `forward`. Its parameters, buffers and names stay."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._is_replaced = "forward" in vars(module)
        self._forward: Callable[..., Any] = module.forward
        self._again = PassAgain(list(module.modules()))
        module.forward = self

    def release(self) -> None:
        """Give the module its `forward` again."""
        if self._is_replaced:
            self._module.forward = self._forward
        else:
            del self._module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._again(self._forward, *args, **kwargs)


class PassAgain:
    """Makes passes through some modules, which are made again in the backward pass."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        own = list(dict.fromkeys(modules))
        self._with_buffers = [one for one in own if one._buffers]
        self._batch_norms = [one for one in own if is_batch_norm(one)]

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What `forward` returns; without gradients, it is not made again."""
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # They join, and cease to join, the sums of ranks between passes.
        found = [_own_forward(one) for one in self._batch_norms]
        norms = [one for one in found if isinstance(one, JointForward)]
        again = _RepeatablePass(forward, self._with_buffers, norms)
        return checkpoint(again, *args, use_reentrant=False, **kwargs)


def _own_forward(module: nn.Module) -> Callable[..., Any]:
    """A module's `forward`, without what recomputes it."""
    forward: Callable[..., Any] = module.forward
    return forward._forward if isinstance(forward, Recomputed) else forward


class _RepeatablePass:
    """A forward pass that can be done again."""

    def __init__(
        self,
        forward: Callable[..., Any],
        with_buffers: Sequence[nn.Module],
        norms: Sequence[JointForward],
    ) -> None:
        self._forward, self._norms = forward, norms
        self._before = [
            (module, name, buffer.clone())
            for module in with_buffers
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._sums: list[list[torch.Tensor]] | None = None
        """by normalisation: the sums that the first pass got"""
        self._dropouts = keyed_dropout.next_call()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._sums is not None:
            with self._as_before(), keyed_dropout.calls_from(self._dropouts):
                return self._forward(*args, **kwargs)
        noted = [norm.note_sums() for norm in self._norms]
        try:
            return self._forward(*args, **kwargs)
        finally:
            self._sums = noted
            for norm in self._norms:
                norm.sums_again(None)

    @contextlib.contextmanager
    def _as_before(self) -> Iterator[None]:
        """Buffers and sums are those of the first pass inside."""
        assert self._sums is not None
        after = [(module, name, module._buffers[name]) for module, name, _ in self._before]
        for module, name, buffer in self._before:
            module._buffers[name] = buffer.clone()
        for norm, sums in zip(self._norms, self._sums, strict=True):
            norm.sums_again(sums)
        try:
            yield
        finally:
            for module, name, kept in after:
                module._buffers[name] = kept
            for norm in self._norms:
                norm.sums_again(None)


def recompute(model: nn.Module, names: Sequence[str]) -> list[Recomputed]:
    """Do the forward passes of these modules again in the backward pass.

    Raises BadInput if the model has no such module.
    """
    known = dict(model.named_modules(remove_duplicate=False))
    found = []
    for name in names:
        if name not in known:
            raise BadInput(
                f"layout.pipelines: recompute: got {name!r}; allowed: a module of the model"
            )
        found.append(Recomputed(known[name]))
    return found
