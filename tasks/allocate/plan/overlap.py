"""How much of a step's computing can hide the sums of gradients. Arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from trainwright.estimator.curves import DeviceCurve
from trainwright.estimator.predict.communication import GRADIENT_BUCKET_BYTES
from trainwright.estimator.structure import LayerFacts

BACKWARD = 2 / 3
"""The backward pass, as a share of a step's work: twice the arithmetic of the forward pass."""
_SAMPLES = 32


def overlap_of(layers: Sequence[LayerFacts], curves: Sequence[DeviceCurve]) -> float:
    """The share of a rank's time in a step after the first bucket of gradients is complete.

    By the layers' times on the first device whose curve has them; BACKWARD if none has.
    """
    curve = next((one for one in curves if one.layers), None)
    if curve is None or not layers:
        return BACKWARD
    seconds, update_s = curve.layer_seconds(_SAMPLES)
    loop_s = curve.loop_part_s(_SAMPLES) or 0.0
    whole = sum(map(sum, seconds)) + update_s + loop_s
    missing = float(GRADIENT_BUCKET_BYTES)
    after = sum(one.input_gradient + one.weight_gradient for one in seconds)
    for layer, one in zip(reversed(layers), reversed(seconds), strict=True):
        after -= one.input_gradient + one.weight_gradient
        missing -= layer.parameter_bytes
        if missing <= 0:
            break
    return min(BACKWARD, max(0.0, after / whole)) if whole > 0 else BACKWARD
