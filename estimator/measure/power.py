"""Measures a device's power over three kinds of work, by its energy meter. Loads torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch  # noqa: TID253 - measuring runs in a separate process

from trainwright.estimator.measure.energy_meter import RAPL_ROOT, meter_for, power_over
from trainwright.estimator.measure.torch_device import TorchDevice
from trainwright.estimator.predict.energy import PowerDraw

_EACH_S = 0.7  # waiting, and again working


def device_power(
    device: TorchDevice, threads: int = 1, rapl_root: Path = RAPL_ROOT
) -> PowerDraw | None:
    """Idle and load power; None if the machine has no meter, or it disappears.

    Takes about 5 s. The result is the share of `threads` cores in their socket's power.
    """
    meter = meter_for(device.device_type, uuid_of(device.torch), rapl_root=rapl_root)
    if meter is None:
        return None
    share = 1.0 if device.is_gpu else min(1.0, threads / (os.cpu_count() or 1))
    try:
        return power_over(meter, _works(device), duration_s=_EACH_S, idle_share=share)
    except OSError:  # the meter disappeared, so neither power is known
        return None


def uuid_of(device: torch.device) -> str | None:
    """NVML's name for a GPU of torch; None for a CPU."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else None


def _works(device: TorchDevice) -> list[Callable[[], None]]:
    """Arithmetic, memory and calls: training is a mixture of them."""
    side, where = 4096 if device.is_gpu else 512, device.torch
    left, right = torch.rand(side, side, device=where), torch.rand(side, side, device=where)
    long, small = torch.rand(8 * side * side, device=where), torch.zeros(4, 4, device=where)

    def multiply() -> None:
        torch.mm(left, right, out=left)
        left.mul_(1 / side)

    def add() -> None:
        torch.add(long, 1.0, out=long)

    def call() -> None:
        for _ in range(100):
            small.add(1)

    return [device.finished(work) for work in (multiply, add, call)]
