"""How often devices send late-multiplied layers again: unlike processors round differently."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from trainwright.estimator.devices import HOST_MEMORY_TYPES
from trainwright.estimator.structure import LayerFacts
from trainwright.tasks.allocate.actions.network import RankNetwork
from trainwright.tasks.allocate.actions.step_simulator import SimulatedStep
from trainwright.tasks.allocate.actions.transfer_sizes import Moved
from trainwright.tasks.allocate.plan.topology import machine_of
from trainwright.tasks.runs.artefacts.layout import Layout
from trainwright.tasks.spec.pool import Device

_LEAST_RESEND, _RESEND_SHARE = 100, 0.01
"""Copies are sent again at most every so many steps, and for at most this share of the time."""


class Resends:
    """The resends of layouts on some devices, which hold `copies` tensors of a parameter's size."""

    def __init__(
        self,
        layers: Sequence[LayerFacts],
        devices: Sequence[Device],
        network: RankNetwork,
        copies: int,
    ) -> None:
        self._layers, self._network, self._copies = layers, network, copies
        self._ranks, self._are_alike = len(devices), _round_alike(devices)

    def added(self, layout: Layout, step: SimulatedStep) -> tuple[Layout, SimulatedStep]:
        """A layout that bounds how far late-multiplied layers drift apart, and its mean step."""
        late = [one for one in self._layers if layout.sync.get(one.name) == "factors"]
        if not late or self._are_alike:
            return layout, step
        moved = Moved(self._copies * sum(one.parameter_bytes for one in late))
        resend_s = self._network.seconds(moved)
        every = max(_LEAST_RESEND, math.ceil(resend_s / (_RESEND_SHARE * step.step_s)))
        more = float(moved.sent_bytes(self._ranks)[0])
        return layout.model_copy(update={"resend_every": every}), replace(
            step,
            step_s=step.step_s + resend_s / every,
            sent_bytes=[one + more / every for one in step.sent_bytes],
        )


def _round_alike(devices: Sequence[Device]) -> bool:
    """Whether devices surely compute the same last digits: GPUs of a type, CPUs of one machine."""
    types = {device.type for device in devices}
    machines = {machine_of(device) for device in devices}
    return len(types) == 1 and (len(machines) == 1 or types.isdisjoint(HOST_MEMORY_TYPES))
