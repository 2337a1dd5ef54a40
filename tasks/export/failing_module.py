"""Finds the module of a model that an exporter can't trace."""

from __future__ import annotations

from collections.abc import Callable

import torch  # noqa: TID253 - this runs in a separate process


def failing_module(model: torch.nn.Module, trace: Callable[[], object]) -> str:
    """The innermost module in whose forward pass `trace` fails, as `name (Class) `.

    Empty if `trace` does not fail, or fails outside of any forward pass.
    """
    inside: list[str] = []
    hooks = []
    for name, module in model.named_modules():
        label = f"{name or 'the model'} ({type(module).__name__})"
        hooks.append(module.register_forward_pre_hook(lambda *_, said=label: inside.append(said)))
        hooks.append(module.register_forward_hook(lambda *_: inside.pop() and None))
    try:
        with torch.no_grad():
            trace()
    except Exception:  # noqa: BLE001 - the caller reports the first error
        return f"{inside[-1]} " if inside else ""
    finally:
        for hook in hooks:
            hook.remove()
    return ""
