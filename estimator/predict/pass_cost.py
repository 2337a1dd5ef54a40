"""What the passes and messages of a pipeline's stage take a rank, beside its layers and the link.

Arithmetic; loads no torch.

A pass over a micro-batch that receives and sends k messages of m bytes in all takes the rank

    pass + k · message + m · byte

beside its layers: it prepares the pass, packs and unpacks tensors, and its thread sends and
receives them on the same core. A message comes `delay` after it was sent, besides the link's
α + m / β: threads have to wake up.

An emulated device's own work is part of its emulated time, so there a pass takes the longer of
both. As its rank runs the model too, its own work has `layer` for each of n layers:
pass + k · message + m · byte + n · layer.

`trainwright.tasks.train.worker.measure_passes` measures all on this machine. Ranks of other hosts
are predicted as if they were this machine's.
"""

from __future__ import annotations

from pydantic import Field

from trainwright.estimator.curves import DeviceCurve
from trainwright.estimator.devices import EMULATED
from trainwright.estimator.frozen_model import FrozenModel


class PassCost(FrozenModel):
    """Seconds of a rank on a whole core."""

    pass_s: float = Field(ge=0, description="of a pass over a micro-batch")
    message_s: float = Field(ge=0, description="of a message, on either end")
    byte_s: float = Field(ge=0, description="of a byte of it, on either end")
    delay_s: float = Field(ge=0, description="until a message is there, besides the link's time")
    layer_s: float = Field(ge=0, description="of a pass of a layer, if the device is emulated")
    measured: bool = Field(description="whether it was measured; else it is assumed")

    def on(self, curve: DeviceCurve) -> PassCost:
        """On a device: a share of a core is slower in proportion; more cores do not help."""
        slower = max(1.0, 1 / curve.cores) if curve.cores else 1.0
        own = {name: slower * getattr(self, name) for name in ("pass_s", "message_s", "byte_s")}
        layer_s = self.layer_s if is_part_of_its_time(curve) else 0.0
        return self.model_copy(update={**own, "layer_s": layer_s})

    def seconds(self, messages: float, moved_bytes: float, layers: float) -> float:
        """Of a pass, beside its layers."""
        return (
            self.pass_s
            + messages * self.message_s
            + moved_bytes * self.byte_s
            + layers * self.layer_s
        )


def is_part_of_its_time(curve: DeviceCurve) -> bool:
    """Whether a rank's own work is part of the time that the layers take the device."""
    return curve.device_type == EMULATED


PRIOR_PASSES = PassCost(
    pass_s=1.5e-4, message_s=1.5e-4, byte_s=3e-10, delay_s=5e-5, layer_s=4e-5, measured=False
)
"""Assumed where nothing was measured."""
