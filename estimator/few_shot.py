"""A device's costs from its datasheet and a few probes: the rates and latencies of highest posterior probability. Loads no torch.

Each family f of operations has a roofline (`datasheet.reached`) whose three constants are off by factors that are to be found:

    log F_f = log(share_f · peak) + g_F + d_Ff        g ~ N(0, general²)   of the device, for all families alike
    log B_f = log(share_f · bandwidth) + g_B + d_Bf   d ~ N(0, own²)       of the family
    log a_f = log(latency_f) + g_a + d_af
    log(measured / Σ a + max(flops / F, bytes / B)) ~ N(0, noise²), with a soft tail (scipy's soft_l1)

A family that no probe runs keeps the datasheet's shares, corrected by what the device showed in general. The interval is the probes'
own scatter about their rooflines and a stated width for what a model's step differs from its operations by. The cross-validated
error leaves each template out in turn: of operations whose like was not probed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from trainwright.estimator import datasheet
from trainwright.estimator.calibration import Calibration, ErrorSummary, StepCorrection
from trainwright.estimator.devices import DEVICE_TYPES
from trainwright.estimator.op_cost import FamilyCost, Kernel, Roofline

GENERAL_WIDTH = (datasheet.RATE_WIDTH, datasheet.RATE_WIDTH, datasheet.LATENCY_WIDTH)
OWN_WIDTH = 0.5
"""Of a family's constants about the device's, as logarithms."""
NOISE = 0.15
"""Of a probe's time about the rooflines of its operations, as a logarithm."""
STEP_WIDTH = 0.2
"""Standard deviation of the logarithm of a model's step over the sum of its operations: a prior, not measured on the device."""
_HALF = 1.645  # of a 90 % interval, in standard deviations
_ABSENT = Kernel(lengths=(), family_sigma=0.0, kind_sigma=0.0, noise=0.0)


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class ProbeOp(_Value):
    """Alike operations of a probe."""

    kind: str
    family: str
    count: int
    flops: float
    bytes: float


class Probe(_Value):
    """A few operations that were timed together: a template at one of its sizes."""

    template: str
    seconds: float
    ops: tuple[ProbeOp, ...]


def fit_few(probes: Sequence[Probe], *, device_type: str, **facts: Any) -> Calibration:
    """The few-shot calibration of a device of a known type; `facts` are the session's. Raises ValueError below two templates."""
    import numpy as np
    from threadpoolctl import threadpool_limits

    templates = sorted({one.template for one in probes})
    if len(templates) < 2:
        raise ValueError(f"probes: got {len(templates)} templates; at least two are needed")
    with threadpool_limits(limits=1, user_api="blas"):
        posterior = _Posterior(device_type)
        found = posterior.fit(probes)
        ratios = np.concatenate([_left_out(posterior, probes, name, found) for name in templates])
    scatter = float(np.quantile(np.abs(np.log([one.seconds for one in probes]) - np.log(posterior.seconds(probes)(found))), 0.9)) / _HALF
    factor = math.exp(_HALF * math.hypot(scatter, STEP_WIDTH))
    errors = np.abs(1 / ratios - 1)
    return Calibration(
        mode="few-shot",
        device_type=device_type,
        families={name: _cost(roofline) for name, roofline in posterior.rooflines(found).items()},
        kinds=tuple(sorted({op.kind for one in probes for op in one.ops})),
        correction=StepCorrection(),
        measurements=len(probes),
        cross_validated_error=ErrorSummary(median=float(np.median(errors)), p90=float(np.quantile(errors, 0.9))),
        low_factor=1 / factor,
        high_factor=factor,
        **facts,
    )


def _left_out(posterior: _Posterior, probes: Sequence[Probe], template: str, start: Any) -> Any:
    """measured / predicted of a template's probes, by the fit to the others."""
    import numpy as np

    found = posterior.fit([one for one in probes if one.template != template], start)
    left = [one for one in probes if one.template == template]
    return np.array([one.seconds for one in left]) / posterior.seconds(left)(found)


def _cost(roofline: Roofline) -> FamilyCost:
    return FamilyCost(roofline=roofline, dims=(), kernel=_ABSENT, kinds=(), points=(), weights=())


class _Posterior:
    """The model of the module's docstring for one device type. Parameters: g (3,), then d (families, 3), in that order."""

    def __init__(self, device_type: str) -> None:
        import numpy as np

        sheet = [datasheet.reached(DEVICE_TYPES[device_type], family) for family in datasheet.FAMILIES]
        self._prior = np.log([[one.flops_per_s, one.bytes_per_s, one.latency_s] for one in sheet])
        self._place = {family: number for number, family in enumerate(datasheet.FAMILIES)}
        self._widths = np.array([*GENERAL_WIDTH, *([OWN_WIDTH] * self._prior.size)])

    def seconds(self, probes: Sequence[Probe]) -> Any:
        """The predicted times of these probes, shape (n,), as a function of the parameters."""
        import numpy as np

        rows = [(number, op) for number, one in enumerate(probes) for op in one.ops]
        at = np.array([number for number, _ in rows])
        family = np.array([self._place.get(op.family, self._place["other"]) for _, op in rows])
        count, flops, moved = (
            np.array([float(getattr(op, name)) for _, op in rows]) for name in ("count", "flops", "bytes")
        )

        def predicted(parameters: Any) -> Any:
            rate, bandwidth, latency = np.exp(self._constants(parameters)[family]).T
            each = count * (latency + np.maximum(flops / rate, moved / bandwidth))
            return np.bincount(at, each, minlength=len(probes))

        return predicted

    def fit(self, probes: Sequence[Probe], start: Any = None) -> Any:
        """The parameters of highest posterior probability."""
        import numpy as np
        from scipy.optimize import least_squares

        predicted, measured = self.seconds(probes), np.log([one.seconds for one in probes])

        def residuals(parameters: Any) -> Any:
            return np.concatenate([
                (np.log(predicted(parameters)) - measured) / NOISE,
                parameters / self._widths,
            ])  # fmt: skip

        begin = np.zeros(len(self._widths)) if start is None else start
        return least_squares(residuals, begin, loss="soft_l1", max_nfev=40, xtol=1e-4, ftol=1e-5).x

    def rooflines(self, parameters: Any) -> dict[str, Roofline]:
        """Each family's, by name."""
        import numpy as np

        return {
            family: Roofline(flops_per_s=float(rate), bytes_per_s=float(bandwidth), latency_s=float(latency))
            for family, (rate, bandwidth, latency) in zip(
                datasheet.FAMILIES, np.exp(self._constants(parameters)), strict=True
            )
        }

    def _constants(self, parameters: Any) -> Any:
        """Logarithms of F, B and a, shape (families, 3)."""
        return self._prior + parameters[:3] + parameters[3:].reshape(self._prior.shape)
