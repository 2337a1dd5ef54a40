"""What a device draws, and what a step takes of it. Loads no torch.

Power comes from a meter where the machine has one (NVML for NVIDIA's devices, RAPL for CPUs), else from the datasheet, and says
which. A meter counts joules of a whole device or socket, whoever uses it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import Field

from trainwright.estimator.curves import DeviceCurve, Interval
from trainwright.estimator.devices import DEVICE_TYPES, cores_used
from trainwright.estimator.errors import BadInput
from trainwright.estimator.frozen_model import FrozenModel

RAPL_ROOT = Path("/sys/class/powercap")
_DATASHEET_SPREAD = 0.5
"""An assumption, not a measurement: boards are stated at their limit, and what training draws of that depends on the model."""


class PowerDraw(FrozenModel):
    """What a device draws, W: `idle_w` leased but waiting, `load_w` computing; and who says so.

    `spread` is the relative half width of the 90 % interval: a power p is predicted as p / (1 + spread) to p · (1 + spread).
    """

    idle_w: float = Field(ge=0)
    load_w: float = Field(ge=0)
    source: Literal["nvml", "rapl", "measured", "datasheet"] = Field(
        description="`measured`: by one of the meters"
    )
    spread: float = Field(default=0.0, ge=0)

    @property
    def energy_source(self) -> Literal["measured", "datasheet"]:
        """The source as estimates name it."""
        return "datasheet" if self.source == "datasheet" else "measured"

    def __mul__(self, factor: float) -> PowerDraw:
        """That of `factor` (>= 0) such devices; a part of a core draws its part."""
        return self.model_copy(
            update={"idle_w": self.idle_w * factor, "load_w": self.load_w * factor}
        )


class EnergyMeter(Protocol):
    """Counts what a device takes. Differences of readings are meaningful, their zero is not."""

    source: Literal["nvml", "rapl"]

    def read_j(self) -> float:
        """Joules counted so far; never less than before. Raises OSError where the meter can be read no longer."""
        ...


class RaplMeter:
    """The sockets and their memory, by RAPL's counters in sysfs (Linux: Documentation/power/powercap/powercap.rst).

    A counter starts again from zero at `max_energy_range_uj`, after minutes to hours of load: read it more often than that.
    """

    source: Literal["nvml", "rapl"] = "rapl"

    def __init__(self, zones: list[Path]) -> None:
        self._counters = [zone / "energy_uj" for zone in zones]
        self._ranges_uj = [_number(zone / "max_energy_range_uj") for zone in zones]
        self._last_uj = [_number(counter) for counter in self._counters]
        self._total_uj = 0

    def read_j(self) -> float:
        """Joules since the meter was made, of all zones."""
        for at, counter in enumerate(self._counters):
            now_uj = _number(counter)
            taken_uj = now_uj - self._last_uj[at]
            self._total_uj += taken_uj if taken_uj >= 0 else taken_uj + self._ranges_uj[at]
            self._last_uj[at] = now_uj
        return self._total_uj * 1e-6


class NvmlMeter:
    """One NVIDIA device of Volta's generation or later, by NVML's counter: nvmlDeviceGetTotalEnergyConsumption, in mJ."""

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
    """The meter of a device of this machine; None where it has none that can be read.

    `uuid` names one of NVIDIA's devices ("GPU-…"): torch and NVML number them each in an order of its own. RAPL's counters are
    often readable by root only. Raises BadInput for an unknown device type.
    """
    _known(device_type)
    if device_type == "cpu":
        return _rapl_meter(rapl_root)
    return _nvml_meter(uuid) if device_type.startswith("nvidia-") and uuid is not None else None


def _rapl_meter(root: Path) -> RaplMeter | None:
    # Sockets ("package-0") hold their cores' zones, but not their memory's ("dram"); "psys" is the whole board, and would
    # count all of it twice. The same counters may be there again as intel-rapl-mmio.
    zones = []
    try:
        for zone in sorted(root.glob("intel-rapl:*")):
            name = (zone / "name").read_text().strip()
            if name.startswith("package") or name == "dram":
                zones.append(zone)
        return RaplMeter(zones) if zones else None
    except (OSError, ValueError):  # no right to read it, or not a counter: there is no meter
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
    except (pynvml.NVMLError, OSError):  # no driver, no such device, or one that counts no energy
        return None
    return meter


def datasheet_power(device_type: str, cores: float | None = None) -> PowerDraw:
    """The maker's figures; of a CPU, for those of its cores (default: one) that its threads keep busy.

    Raises BadInput for an unknown device type.
    """
    _known(device_type)
    device = DEVICE_TYPES[device_type]
    share = cores_used(cores) if device_type == "cpu" else 1.0
    return PowerDraw(
        idle_w=device.idle_w * share,
        load_w=device.load_w * share,
        source="datasheet",
        spread=_DATASHEET_SPREAD,
    )


def measured_power(
    meter: EnergyMeter,
    work: Callable[[], object],
    *,
    duration_s: float = 2.0,
    idle_share: float = 1.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> PowerDraw:
    """What a device draws while it waits, and while it does `work`, over and over, for so many seconds each.

    A socket's idle power is shared by its cores: with P as read, idle = share · P_idle and load = idle + (P_work − P_idle).
    Raises ValueError for a duration or share out of bounds, OSError from the meter.
    """
    if duration_s <= 0 or not 0 < idle_share <= 1:
        raise ValueError(
            f"duration {duration_s:g} s, share {idle_share:g}; allowed: above 0 s, a share above 0, up to 1"
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
    # Counters step coarsely, and others may have worked while this waited: computing never draws less than waiting.
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
    """What a device draws over different work: the geometric mean, and how far the works are from it as the spread.

    Raises as `measured_power`, and ValueError for no work.
    """
    if not works:
        raise ValueError("works: got none; at least one is needed")
    seen = [
        measured_power(meter, work, duration_s=duration_s, idle_share=idle_share) for work in works
    ]
    idle_w = min(one.idle_w for one in seen)  # others may have worked while this waited
    load_w = max(
        idle_w, math.exp(statistics.fmean(math.log(max(one.load_w, 1e-9)) for one in seen))
    )
    spread = max(
        (max(one.load_w / load_w, load_w / one.load_w) - 1 for one in seen if one.load_w > 0),
        default=0.0,
    )
    return PowerDraw(idle_w=idle_w, load_w=load_w, source=meter.source, spread=spread)


def power_of(curve: DeviceCurve) -> PowerDraw | None:
    """What a curve says of its device's power; None where it says nothing."""
    if curve.idle_w is None or curve.load_w is None:
        return None
    source = curve.energy_source or "datasheet"
    return PowerDraw(
        idle_w=curve.idle_w, load_w=curve.load_w, source=source, spread=curve.power_spread
    )


def step_energy(step_time: Interval, power: PowerDraw, *, wait_s: float = 0.0) -> Interval:
    """Joules of one step on one device: load_w · step_time + idle_w · wait, where it then waits for others.

    The bounds are those of time and power erring together. Raises ValueError for a negative wait.
    """
    if wait_s < 0:
        raise ValueError(f"wait {wait_s:g} s; allowed: 0 s or more")

    def energy_j(seconds: float, factor: float) -> float:
        return (power.load_w * seconds + power.idle_w * wait_s) * factor

    return Interval(
        median=energy_j(step_time.median, 1.0),
        low=energy_j(step_time.low, 1 / (1 + power.spread)),
        high=energy_j(step_time.high, 1 + power.spread),
    )


def _number(path: Path) -> int:
    return int(path.read_text())


def _known(device_type: str) -> None:
    if device_type not in DEVICE_TYPES:
        raise BadInput(
            f"device type: got {device_type[:80]!r}; allowed: {', '.join(sorted(DEVICE_TYPES))}"
        )
