"""Counts devices by kind, with readable names."""

from __future__ import annotations

from collections.abc import Iterable

from trainwright.tasks.spec.pool import Device


def device_counts(devices: Iterable[Device]) -> dict[str, int]:
    """Number of devices by kind, in the order given; the kind's name states cores and speed."""
    counts: dict[str, int] = {}
    for device in devices:
        name = kind_name(device.type, device.cores, device.speed)
        counts[name] = counts.get(name, 0) + 1
    return counts


def kind_name(device_type: str, cores: float | None, speed: float | None) -> str:
    """`cpu (0.5 cores)`: a type with its cores and its speed, if it has them."""
    name = device_type
    if cores is not None:
        name += f" ({cores:g} core{'s' if cores != 1 else ''})"
    if speed is not None:
        name += f" (speed {speed:g}, emulated)"
    return name


def as_text(counts: dict[str, int]) -> str:
    """Counts by kind in one line: `2 x cpu (1 core), 1 x nvidia-t4`."""
    return ", ".join(f"{count} x {kind}" for kind, count in counts.items())
