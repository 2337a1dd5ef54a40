"""The power of a device and the energy of a step. Arithmetic; loads no torch.

Power is measured if the machine has a meter (`measure.energy_meter`), else it is the datasheet's;
`PowerDraw.source` says which.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trainwright.estimator.curves import DeviceCurve, Interval
from trainwright.estimator.devices import cores_used, known_type
from trainwright.estimator.frozen_model import FrozenModel

_DATASHEET_SPREAD = 0.5
"""An assumption: makers state a board's limit; the share drawn by training depends on the model."""


class PowerDraw(FrozenModel):
    """A device's power in W: `idle_w` while it is leased but waits, `load_w` while it computes.

    `spread` is the relative half width of the 90 % interval: a power p is predicted as
    p / (1 + spread) to p · (1 + spread).
    """

    idle_w: float = Field(ge=0, description="while it waits")
    load_w: float = Field(ge=0, description="while it computes")
    source: Literal["nvml", "rapl", "measured", "datasheet"] = Field(
        description="`measured`: if it is from a meter"
    )
    spread: float = Field(default=0.0, ge=0, description="relative half width of the 90 % interval")

    @property
    def energy_source(self) -> Literal["measured", "datasheet"]:
        """The source in the words of an estimate."""
        return "datasheet" if self.source == "datasheet" else "measured"

    def __mul__(self, factor: float) -> PowerDraw:
        """The power of `factor` (>= 0) such devices; a share of a core draws that share."""
        return self.model_copy(
            update={"idle_w": self.idle_w * factor, "load_w": self.load_w * factor}
        )


def datasheet_power(device_type: str, cores: float | None = None) -> PowerDraw:
    """The maker's figures; for a CPU, of the cores (default: one) that its threads keep busy.

    Raises BadInput for an unknown device type.
    """
    device = known_type(device_type)
    share = cores_used(cores) if device_type == "cpu" else 1.0
    return PowerDraw(
        idle_w=device.idle_w * share,
        load_w=device.load_w * share,
        source="datasheet",
        spread=_DATASHEET_SPREAD,
    )


def power_of(curve: DeviceCurve) -> PowerDraw | None:
    """The power of a curve's device; None if the curve does not have it."""
    if curve.idle_w is None or curve.load_w is None:
        return None
    source = curve.energy_source or "datasheet"
    return PowerDraw(
        idle_w=curve.idle_w, load_w=curve.load_w, source=source, spread=curve.power_spread
    )


def step_energy(step_time: Interval, power: PowerDraw, *, wait_s: float = 0.0) -> Interval:
    """Joules of one step on one device: load_w · step_time + idle_w · wait for other ranks.

    The bounds assume that the errors of time and power coincide. Raises ValueError for a negative
    wait.
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
