"""The optimizers of a training, in one place for tracing, measuring and training. Heavy: torch.

On a CPU the step of torch's `fused` kernels takes one pass over parameters, gradients and moments, and no memory besides; the
usual loop takes about nine, with temporaries (1.1 ms against 0.3 ms for half a million parameters and AdamW on one core).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch  # noqa: TID253 - whoever makes a step is a process of its own


def make_optimizer(
    parameters: Iterable[torch.nn.Parameter], name: str, *, learning_rate: float, momentum: float, weight_decay: float
) -> torch.optim.Optimizer:
    """torch.optim's `sgd`, `momentum` (SGD with it), `adam` or `adamw`."""
    chosen = list(parameters)
    fused = fuses(chosen) or None  # None: as torch thinks best
    if name in ("sgd", "momentum"):
        speed = momentum if name == "momentum" else 0.0
        return torch.optim.SGD(chosen, lr=learning_rate, momentum=speed, weight_decay=weight_decay, fused=fused)
    kind = torch.optim.Adam if name == "adam" else torch.optim.AdamW
    return kind(chosen, lr=learning_rate, weight_decay=weight_decay, fused=fused)


def fuses(parameters: list[torch.nn.Parameter]) -> bool:
    """Whether the fused kernels do for these what the loop does.

    They take memory in its order, whatever the strides. In half precision they round less often than the loop does, and so
    find something else.
    """
    return all(
        one.device.type == "cpu" and one.dtype in (torch.float32, torch.float64) and one.is_contiguous()
        for one in parameters
    )
