"""Gradients of the joint batch from ranks with unequal batches.

With loss_r the mean over rank r's b_r samples, the mean over all B is Σ_r (b_r / B) · loss_r. So each rank scales its loss by
b_r / B before the backward pass, and the gradients are summed (not averaged: that would be off by 25 % at a 3:1 split).

All gradients travel as one flat buffer, always in the same order: with three ranks or more, the order of a sum is part of its
last digit, and a replay must have the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch  # noqa: TID253 - only ranks import this

from trainwright.tasks.train.collective import Collective


class GradientSum:
    """Sums the gradients of some parameters over all ranks."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], collective: Collective) -> None:
        self._groups: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            if parameter.requires_grad:
                self._groups.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        self._buffers = {
            (dtype, device): torch.zeros(sum(one.numel() for one in group), dtype=dtype, device=device)
            for (dtype, device), group in self._groups.items()
        }
        self._collective = collective
        self._handles: list[Any] = []

    def start(self) -> None:
        """After backward: begin the sum. A parameter that this rank did not use counts as zero."""
        self._handles = []
        for key, group in self._groups.items():
            buffer, at = self._buffers[key], 0
            for parameter in group:
                part = buffer[at : at + parameter.numel()]
                part.zero_() if parameter.grad is None else part.copy_(parameter.grad.reshape(-1))
                at += parameter.numel()
            self._handles.append(self._collective.start_sum(buffer, f"gradients.{key[0]}"))

    def finish(self) -> None:
        """Wait for the sum: every `grad` becomes the sum over ranks."""
        for handle, (key, group) in zip(self._handles, self._groups.items(), strict=True):
            self._collective.finish(handle)
            buffer, at = self._buffers[key], 0
            for parameter in group:
                part = buffer[at : at + parameter.numel()].view_as(parameter)
                if parameter.grad is None:
                    parameter.grad = part.clone()
                else:
                    parameter.grad.copy_(part)
                at += parameter.numel()
