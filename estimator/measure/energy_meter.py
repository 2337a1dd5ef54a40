"""Energy meters of a machine's devices, and their power when idle and at work. Loads no torch.

NVML counts the energy of NVIDIA's devices, RAPL that of CPU sockets. A meter counts joules of the
whole device or socket, including other processes.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from trainwright.estimator.devices import known_type
from trainwright.estimator.predict.energy import PowerDraw

RAPL_ROOT = Path("/sys/class/powercap")


class EnergyMeter(Protocol):
    """Counts the energy of a device. Only differences of readings are meaningful."""

    source: Literal["nvml", "rapl"]

    def read_j(self) -> float:
        """Joules counted so far; never less than before. Raises OSError if it can't be read."""
        ...


class RaplMeter:
    """The sockets and their memory, from RAPL's counters in sysfs.

    Source: Linux, Documentation/power/powercap/powercap.rst. A counter wraps to zero at
    `max_energy_range_uj`, after minutes to hours of load: it must be read more often than that.
    """

    source: Literal["nvml", "rapl"] = "rapl"

    def __init__(self, zones: list[Path]) -> None:
        self._counters = [zone / "energy_uj" for zone in zones]
        self._ranges_uj = [_number(zone / "max_energy_range_uj") for zone in zones]
        self._last_uj = [_number(counter) for counter in self._counters]
        self._total_uj = 0

    def read_j(self) -> float:
        """Joules of all zones since the meter was created."""
        for at, counter in enumerate(self._counters):
            now_uj = _number(counter)
            taken_uj = now_uj - self._last_uj[at]
            self._total_uj += taken_uj if taken_uj >= 0 else taken_uj + self._ranges_uj[at]
            self._last_uj[at] = now_uj
        return self._total_uj * 1e-6


class NvmlMeter:
    """One NVIDIA device, of the generation Volta or later.

    NVML's counter is nvmlDeviceGetTotalEnergyConsumption, in mJ.
    """

    source: Literal["nvml", "rapl"] = "nvml"

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle

    def read_j(self) -> float:
        """Joules since the driver was loaded."""
        try:
            return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) * 1e-3
        except self._nvml.NVMLError as error:
            raise OSError(f"NVML: the energy counter can't be read ({error})") from error


def meter_for(
    device_type: str, uuid: str | None = None, *, rapl_root: Path = RAPL_ROOT
) -> EnergyMeter | None:
    """The meter of a device of this machine; None if none can be read.

    `uuid` names an NVIDIA device ("GPU-…"), because torch and NVML number devices differently.
    Often only root may read RAPL's counters. Raises BadInput for an unknown device type.
    """
    known_type(device_type)
    if device_type == "cpu":
        return _rapl_meter(rapl_root)
    return _nvml_meter(uuid) if device_type.startswith("nvidia-") and uuid is not None else None


def _rapl_meter(root: Path) -> RaplMeter | None:
    # A socket ("package-0") includes its cores' zones, but not that of its memory ("dram"). "psys"
    # is the whole board and would count everything twice. The same counters may exist again as
    # intel-rapl-mmio.
    zones = []
    try:
        for zone in sorted(root.glob("intel-rapl:*")):
            name = (zone / "name").read_text().strip()
            if name.startswith("package") or name == "dram":
                zones.append(zone)
        return RaplMeter(zones) if zones else None
    except (OSError, ValueError):  # no permission to read it, or not a counter
        return None


def _nvml_meter(uuid: str) -> NvmlMeter | None:
    try:
        import pynvml  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        meter = NvmlMeter(pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid))
        meter.read_j()
    except (pynvml.NVMLError, OSError):  # no driver, no such device, or no counter
        return None
    return meter


def measured_power(
    meter: EnergyMeter,
    work: Callable[[], object],
    *,
    duration_s: float = 2.0,
    idle_share: float = 1.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> PowerDraw:
    """The power of a device when idle and while it repeats `work`, each measured for `duration_s`.

    The cores of a socket share its idle power: with P as read, idle = share · P_idle and
    load = idle + (P_work − P_idle). Raises ValueError for a duration or share out of bounds, and
    OSError from the meter.
    """
    if duration_s <= 0 or not 0 < idle_share <= 1:
        raise ValueError(
            f"got a duration of {duration_s:g} s and a share of {idle_share:g}; allowed: above "
            "0 s, and a share above 0, up to 1"
        )
    before, started = meter.read_j(), clock()
    sleep(duration_s)
    between, changed = meter.read_j(), clock()
    while (ended := clock()) - changed < duration_s:
        work()
    after = meter.read_j()
    waiting_w = (between - before) / (changed - started)
    working_w = (after - between) / (ended - changed)
    idle_w = idle_share * waiting_w
    # Counters have coarse steps, and other programs may have run while this one waited; but
    # computing never draws less than waiting.
    return PowerDraw(
        idle_w=idle_w, load_w=idle_w + max(0.0, working_w - waiting_w), source=meter.source
    )


def power_over(
    meter: EnergyMeter,
    works: Sequence[Callable[[], object]],
    *,
    duration_s: float = 1.0,
    idle_share: float = 1.0,
) -> PowerDraw:
    """The power of a device over several kinds of work: their geometric mean.

    The spread is the largest distance of a kind from the mean. Raises the errors of
    `measured_power`, and ValueError for no work.
    """
    if not works:
        raise ValueError("works: got none; at least one is needed")
    seen = [
        measured_power(meter, work, duration_s=duration_s, idle_share=idle_share) for work in works
    ]
    idle_w = min(one.idle_w for one in seen)  # other programs may have worked meanwhile
    load_w = max(
        idle_w, math.exp(statistics.fmean(math.log(max(one.load_w, 1e-9)) for one in seen))
    )
    spread = max(
        (max(one.load_w / load_w, load_w / one.load_w) - 1 for one in seen if one.load_w > 0),
        default=0.0,
    )
    return PowerDraw(idle_w=idle_w, load_w=load_w, source=meter.source, spread=spread)


def _number(path: Path) -> int:
    return int(path.read_text())
