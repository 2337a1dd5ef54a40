"""What a device of this machine draws, by its meter, over three kinds of work. Heavy: torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch  # noqa: TID253 - measuring runs in a process of its own

from trainwright.estimator.predict.energy import RAPL_ROOT, PowerDraw, meter_for, power_over

_EACH_S = 0.7  # waiting, and again working


def device_power(
    device_type: str, device: torch.device, threads: int = 1, rapl_root: Path = RAPL_ROOT
) -> PowerDraw | None:
    """Idle and load power; None where the machine has no meter that can be read to the end. Takes about 5 s.

    A socket's idle power is shared by its cores, of which `threads` are taken.
    """
    meter = meter_for(device_type, uuid_of(device), rapl_root=rapl_root)
    if meter is None:
        return None
    share = min(1.0, threads / (os.cpu_count() or 1)) if device_type == "cpu" else 1.0
    try:
        return power_over(meter, _works(device), duration_s=_EACH_S, idle_share=share)
    except OSError:  # the meter went away: what it counted so far says nothing of either
        return None


def uuid_of(device: torch.device) -> str | None:
    """What NVML calls a GPU of torch's; None for a CPU."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else None


def _works(device: torch.device) -> list[Callable[[], None]]:
    """Arithmetic, memory, and calls: training lies between them."""
    side = 512 if device.type == "cpu" else 4096
    left, right = torch.rand(side, side, device=device), torch.rand(side, side, device=device)
    long, small = torch.rand(8 * side * side, device=device), torch.zeros(4, 4, device=device)

    def done() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def multiply() -> None:
        torch.mm(left, right, out=left)
        left.mul_(1 / side)
        done()

    def add() -> None:
        torch.add(long, 1.0, out=long)
        done()

    def call() -> None:
        for _ in range(100):
            small.add(1)
        done()

    return [multiply, add, call]
