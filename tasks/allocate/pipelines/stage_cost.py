"""What stages' passes take devices beside their layers, for many stages at once. Numpy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainwright.estimator.curves import DeviceCurve
from trainwright.estimator.predict.pass_cost import PassCost, is_part_of_its_time

_PARTS = ("pass_s", "message_s", "byte_s", "layer_s")


@dataclass(frozen=True)
class StageCost:
    """`PassCost` of some devices, as arrays over them."""

    pass_s: Any
    message_s: Any
    byte_s: Any
    layer_s: Any
    is_part: Any
    """whether it is part of the time of the layers (booleans)"""
    delay_s: float

    @classmethod
    def of(cls, cost: PassCost | None, curves: Sequence[DeviceCurve]) -> StageCost:
        """The cost on devices with these curves; None: nothing."""
        import numpy as np

        if cost is None:
            none = np.zeros(len(curves))
            return cls(none, none, none, none, none > 0, 0.0)
        own = [cost.on(curve) for curve in curves]
        parts: dict[str, Any] = {
            name: np.array([getattr(one, name) for one in own]) for name in _PARTS
        }
        is_part = np.array([is_part_of_its_time(curve) for curve in curves])
        return cls(**parts, is_part=is_part, delay_s=cost.delay_s)

    def of_devices(self, devices: Sequence[int]) -> StageCost:
        """The cost on some of the devices."""
        own = list(devices)
        parts = {name: getattr(self, name)[own] for name in (*_PARTS, "is_part")}
        return replace(self, **parts)

    def least(self, shown: Sequence[int], members: Sequence[Sequence[int]]) -> StageCost:
        """The same, with the least of each kind's members on the device that stands for it."""
        changed = {name: getattr(self, name).copy() for name in (*_PARTS, "is_part")}
        for one, own in zip(shown, members, strict=True):
            for name in _PARTS:
                changed[name][one] = getattr(self, name)[list(own)].min()
            changed["is_part"][one] = self.is_part[list(own)].any()
        return replace(self, **changed)

    def longer(
        self,
        devices: Any,
        compute_s: Any,
        *,
        messages: Any,
        moved_bytes: Any,
        layers: Any,
        passes: int = 1,
    ) -> Any:
        """What passes take more than their layers; `devices` has the same shape, or broadcasts.

        `messages` and the bytes are of all `passes`, `layers` of each.
        """
        import numpy as np

        own = (
            passes * (self.pass_s[devices] + layers * self.layer_s[devices])
            + messages * self.message_s[devices]
            + moved_bytes * self.byte_s[devices]
        )
        return np.where(self.is_part[devices], np.maximum(0.0, own - compute_s), own)
