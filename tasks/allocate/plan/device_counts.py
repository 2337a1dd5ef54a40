"""Counts devices by kind, with readable names."""

from __future__ import annotations

from collections.abc import Iterable

from trainwright.tasks.spec.pool import Device


def device_counts(devices: Iterable[Device]) -> dict[str, int]:
    """Number of devices by kind, in the order given; the kind's name states cores and speed."""
    counts: dict[str, int] = {}
    for device in devices:
        name = device.type
        if device.cores is not None:
            name += f" ({device.cores:g} core{'s' if device.cores != 1 else ''})"
        if device.speed is not None:
            name += f" (speed {device.speed:g}, emulated)"
        counts[name] = counts.get(name, 0) + 1
    return counts


def as_text(counts: dict[str, int]) -> str:
    """Counts by kind in one line: `2 x cpu (1 core), 1 x nvidia-t4`."""
    return ", ".join(f"{count} x {kind}" for kind, count in counts.items())
