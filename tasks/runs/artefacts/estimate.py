"""estimate.json: what a step of the model costs on each kind of device."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from trainwright.estimator.curves import DeviceCurve, Mode
from trainwright.estimator.predict.communication import Link
from trainwright.estimator.predict.pass_cost import PRIOR_PASSES, PassCost
from trainwright.estimator.structure import LayerFacts, RecordedStep, Unit
from trainwright.tasks.runs.artefacts.artefact import Artefact
from trainwright.tasks.spec.pool import Device


class Estimate(Artefact):
    """estimate.json: one curve for each kind of device in the pool."""

    FILE: ClassVar[str] = "estimate.json"
    mode: Mode = Field(
        description="calibrated, few-shot or datasheet: the least sure one of its curves"
    )
    curves: list[DeviceCurve]
    learned_from: int = Field(
        default=0, description="number of finished runs that corrected the curves; the highest"
    )
    layers: list[LayerFacts] = Field(
        default_factory=list,
        description="the model's layers, in the order of the forward pass; empty: not known",
    )
    units: list[Unit] = Field(
        default_factory=list,
        description="the model's parts between places where it can be cut; empty: it can't be",
    )
    not_cut: str = Field(default="", description="why the model can't be cut")
    builds_parts: bool = Field(
        default=False,
        description="whether ranks of pipelines build only what they hold; else the whole model",
    )
    step: RecordedStep | None = Field(
        default=None,
        description="what each module keeps for the backward pass; None: not known, so plans don't "
        "recompute",
    )
    gradient_bytes: float = Field(description="bytes that each step's all-reduce carries")
    calibrations: dict[str, str] = Field(
        default_factory=dict, description="sha256 of the calibration, by device kind"
    )
    local_link: Link | None = Field(
        default=None,
        description="measured link between ranks of this machine; None: not needed or not measured",
    )
    passes: PassCost | None = Field(
        default=None,
        description="what passes and messages of pipelines take ranks of this machine; None: not "
        "measured",
    )
    cycle_s: float = Field(
        default=0.0,
        description="interval at which the collectives' library starts sums; 0: at once",
    )

    @property
    def pass_cost(self) -> PassCost:
        """What passes and messages of pipelines take: as measured, or as assumed."""
        return self.passes or PRIOR_PASSES

    def curve(self, device: Device) -> DeviceCurve:
        """The curve for a device. Raises KeyError if there is none."""
        found = self.find(device)
        if found is None:
            raise KeyError(device.variant)
        return found

    def find(self, device: Device) -> DeviceCurve | None:
        """The curve for a device; None if there is none."""
        kind = device.variant
        for curve in self.curves:
            where = (curve.local, curve.host_memory_bytes)
            if (curve.device_type, curve.cores, curve.speed) == kind[:3] and (
                curve.local is None or where == kind[3:]
            ):
                return curve
        return None
