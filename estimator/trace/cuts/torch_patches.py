"""Shows a recorder what does not pass through torch's function modes. Loads torch.

Calls of modules, attributes that are set, dropouts inside other functions, own functions of
autograd, and hooks on what is saved for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol
from unittest.mock import patch

import torch  # noqa: TID253 - recording runs in a separate process
from torch import nn  # noqa: TID253
from torch.nn import functional  # noqa: TID253
from torch.nn.modules import transformer  # noqa: TID253

from trainwright.estimator.trace.cuts.forward_graph import CallKind
from trainwright.estimator.trace.cuts.known_calls import DROPOUTS

_CHECKPOINT = (
    "computes activations again itself (torch.utils.checkpoint) or hooks what is saved for the "
    "backward pass: leave recomputation to the plan"
)


class Recorder(Protocol):
    """What the patches call."""

    def follows(self) -> bool:
        """Whether opened code runs, whose calls are recorded."""

    def module_call(self, call: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a module, opened or as one call."""

    def record_call(self, kind: CallKind, target: Any, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a call whose own calls are not recorded, and record it."""

    def count_dropout(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a dropout inside a call, and count it."""

    def attribute_set(self, module: nn.Module) -> None:
        """An attribute of a module was set."""

    def mask_read(self, mask: torch.Tensor | None, read: Callable[[], bool]) -> bool:
        """The code of torch's transformers reads the values of a mask."""

    def trouble(self, what: str) -> None:
        """Opened code does what can't be repeated call by call."""


def patches(recorder: Recorder) -> list[Any]:
    """Context managers that replace parts of torch while a recorder follows a pass."""
    call, set_attribute = nn.Module.__call__, nn.Module.__setattr__
    apply = vars(torch.autograd.Function)["apply"]
    hooks = torch.autograd.graph.saved_tensors_hooks
    enter, detect = hooks.__enter__, transformer._detect_is_causal_mask

    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return recorder.module_call(call, module, args, kwargs)

    def attribute_set(module: nn.Module, name: str, value: Any) -> None:
        recorder.attribute_set(module)
        set_attribute(module, name, value)

    def applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
        function = apply.__get__(None, cls)
        if not recorder.follows():
            return function(*args, **kwargs)
        return recorder.record_call("function", function, function, args, kwargs)

    def entered(own: Any) -> Any:
        if recorder.follows():
            recorder.trouble(_CHECKPOINT)
        return enter(own)

    def detected(mask: Any, *args: Any, **kwargs: Any) -> bool:
        return recorder.mask_read(mask, lambda: detect(mask, *args, **kwargs))

    return [
        patch.object(nn.Module, "__call__", called),
        patch.object(nn.Module, "__setattr__", attribute_set),
        patch.object(torch.autograd.Function, "apply", classmethod(applied)),
        patch.object(hooks, "__enter__", entered),
        patch.object(transformer, "_detect_is_causal_mask", detected),
        *(patch.object(functional, name, _dropout(recorder, name)) for name in DROPOUTS),
    ]


def _dropout(recorder: Recorder, name: str) -> Callable[..., Any]:
    original = getattr(functional, name)

    def function(*args: Any, **kwargs: Any) -> Any:
        if recorder.follows():
            return recorder.record_call("functional", name, original, args, kwargs)
        return recorder.count_dropout(name, original, args, kwargs)

    function.replaces = name  # type: ignore[attr-defined]
    return function
