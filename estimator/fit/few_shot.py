"""A device's costs from its datasheet and a few probes: the rates and latencies of highest posterior probability. Loads no torch.

Each family f of operations has a roofline (`datasheet.reached`) whose three constants are off by factors that are to be found:

    log F_f = log(share_f · peak) + g_F + d_Ff        g ~ N(0, general²)   of the device, for all families alike
    log B_f = log(share_f · bandwidth) + g_B + d_Bf   d ~ N(0, own²)       of the family
    log a_f = log(latency_f) + g_a + d_af
    log(measured / Σ a + max(flops / F, bytes / B)) ~ N(0, noise² + σ²), with a soft tail (scipy's soft_l1)

What the probes show beyond that, each family's r of `op_cost` follows: a Gaussian process of stated kernel, not fitted.
A family that no probe runs keeps the datasheet's shares, corrected by what the device showed in general. What a step takes beyond
its operations (colder caches, Python, autograd) is told by small steps among the probes: c · Σ t + d · operations, c and d near
their priors. The interval is that of `calibration`, its σ₀ the scatter of these steps, each template left out in turn, and a
stated width for other models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from trainwright.estimator.devices import DEVICE_TYPES
from trainwright.estimator.frozen_model import FrozenModel
from trainwright.estimator.predict import datasheet
from trainwright.estimator.predict.calibration import Calibration, ErrorSummary, StepCorrection
from trainwright.estimator.predict.op_cost import FamilyCost, Kernel, Roofline, log_point, times
from trainwright.estimator.predict.step_work import by_family, cost_family
from trainwright.estimator.quantiles import NINETY, quantile

GENERAL_WIDTH = (datasheet.RATE_WIDTH, datasheet.RATE_WIDTH, datasheet.LATENCY_WIDTH)
OWN_WIDTH = 0.5
"""Of a family's constants about the device's, as logarithms."""
NOISE = 0.15
"""Of a probe's time about what its operations take, as a logarithm."""
STEP_WIDTH = 0.2
"""Standard deviation of the logarithm of a model's step over what is predicted of it: a prior, not measured on the device."""
PER_OP_S = 1e-6
"""What Python and autograd add to an operation of a step, about."""
LENGTH, FAMILY_SIGMA, KIND_SIGMA = 2.0, 0.4, 0.3
"""Of the process: it forgets over a factor of e² in any size, and goes as far as such logarithms from the rooflines."""


class ProbeOp(FrozenModel):
    """Alike operations of a probe."""

    kind: str
    family: str
    count: int
    flops: float
    bytes: float
    dims: dict[str, float] = Field(default_factory=dict)


class Probe(FrozenModel):
    """A few operations that were timed together: a template at one of its sizes.

    `step` where it is a whole training step: it tells what a step takes beyond its operations.
    """

    template: str
    step: bool = False
    seconds: float
    ops: tuple[ProbeOp, ...]


def fit_few(probes: Sequence[Probe], *, device_type: str, **facts: Any) -> Calibration:
    """The few-shot calibration of a device of a known type; `facts` are the session's.

    Raises ValueError below two templates of operations, or two of steps.
    """
    import numpy as np
    from threadpoolctl import threadpool_limits

    single, steps = ([one for one in probes if one.step is kind] for kind in (False, True))
    for name, some in (("operations", single), ("steps", steps)):
        if len({one.template for one in some}) < 2:
            raise ValueError(
                f"probes: got {len(some)} of {name}; at least two templates are needed"
            )
    with threadpool_limits(limits=1, user_api="blas"):
        rooflines = _Rooflines(device_type)
        costs = _costs(rooflines, rooflines.fit(single), single)
        ops_s = np.array([_ops_s(costs, one) for one in steps])
        counts = np.array([float(sum(op.count for op in one.ops)) for one in steps])
        seconds = np.array([one.seconds for one in steps])
        off = np.concatenate(
            [
                _log_ratio(
                    _correction(ops_s[~left], counts[~left], seconds[~left]),
                    ops_s[left],
                    counts[left],
                    seconds[left],
                )
                for left in (
                    np.array([one.template == name for one in steps])
                    for name in {one.template for one in steps}
                )
            ]
        )
    errors = np.abs(np.exp(-off) - 1)
    return Calibration(
        mode="few-shot",
        device_type=device_type,
        families=costs,
        kinds=tuple(sorted({op.kind for one in probes for op in one.ops})),
        correction=_correction(ops_s, counts, seconds),
        measurements=len(probes),
        cross_validated_error=ErrorSummary(
            median=float(np.median(errors)), p90=quantile(errors.tolist(), 0.9)
        ),
        step_deviation=math.hypot(float(np.sqrt((off**2).mean())), STEP_WIDTH),
        interval_quantile=NINETY,
        **facts,
    )


def _ops_s(costs: dict[str, FamilyCost], probe: Probe) -> float:
    work = by_family(
        [(op.family, op.kind, op.count, op.flops, op.bytes, op.dims) for op in probe.ops]
    )
    return sum(float(times(costs, name, each)[0].sum()) for name, each in work.items())


def _correction(ops_s: Any, counts: Any, seconds: Any) -> StepCorrection:
    """c and d of a step, c · Σ t + d · operations: log c ~ N(0, STEP_WIDTH²), log d ~ N(log PER_OP_S, 1)."""
    import numpy as np
    from scipy.optimize import least_squares

    def made(logs: Any) -> StepCorrection:
        return StepCorrection(
            scale=math.exp(STEP_WIDTH * logs[0]), per_op_s=PER_OP_S * math.exp(logs[1])
        )

    def residuals(logs: Any) -> Any:
        return np.concatenate([_log_ratio(made(logs), ops_s, counts, seconds) / NOISE, logs])

    return made(least_squares(residuals, np.zeros(2)).x)


def _log_ratio(correction: StepCorrection, ops_s: Any, counts: Any, seconds: Any) -> Any:
    """log(measured / predicted)."""
    import numpy as np

    return np.log(seconds / correction(ops_s, counts))


def _costs(rooflines: _Rooflines, found: Any, probes: Sequence[Probe]) -> dict[str, FamilyCost]:
    """Each family's cost: its roofline, and r of what was probed of it.

    A probe sees its operations' r by their shares w of its time: y = Σ w r + noise, so r(x) = k(x, X) Wᵀ (W K Wᵀ + noise² 1)⁻¹ y
    (Rasmussen and Williams, equation 2.23 of sums).
    """
    import numpy as np

    y = np.log([one.seconds for one in probes]) - np.log(rooflines.seconds(probes)(found))
    made = rooflines.made(found)
    covariance = NOISE**2 * np.eye(len(probes))
    seen: dict[str, tuple[Any, ...]] = {}
    for family, roofline in made.items():
        rows = [
            (number, op)
            for number, one in enumerate(probes)
            for op in one.ops
            if cost_family(op.family, op.dims) == family
        ]
        if not rows:
            continue
        names = tuple(sorted({name for _, op in rows for name in op.dims}))
        points = np.array([log_point(op.flops, op.bytes, op.dims, names) for _, op in rows])
        kinds = tuple(op.kind for _, op in rows)
        kernel = Kernel(
            lengths=(LENGTH,) * points.shape[1],
            family_sigma=FAMILY_SIGMA,
            kind_sigma=KIND_SIGMA,
            noise=NOISE,
        )
        shares = np.zeros((len(probes), len(rows)))
        for place, (number, op) in enumerate(rows):
            shares[number, place] = op.count * float(roofline(op.flops, op.bytes))
        shares /= rooflines.seconds(probes)(found)[:, None]
        alike = np.array(kinds)[:, None] == np.array(kinds)[None, :]
        covariance += shares @ kernel(points, points, alike) @ shares.T
        seen[family] = (names, kernel, kinds, points, shares)
    alpha = np.linalg.solve(covariance, y)
    costs = {family: _unseen(roofline) for family, roofline in made.items()}
    for family, (names, kernel, kinds, points, shares) in seen.items():
        costs[family] = FamilyCost(
            roofline=made[family],
            dims=names,
            kernel=kernel,
            kinds=kinds,
            points=tuple(tuple(round(float(value), 5) for value in row) for row in points),
            weights=tuple(float(value) for value in shares.T @ alpha),
        )
    return costs


def _unseen(roofline: Roofline) -> FamilyCost:
    """A family that no probe ran: as far off as its constants may be."""
    nothing = Kernel(lengths=(), family_sigma=OWN_WIDTH, kind_sigma=0.0, noise=0.0)
    return FamilyCost(roofline=roofline, dims=(), kernel=nothing, kinds=(), points=(), weights=())


class _Rooflines:
    """The model of the module's docstring for one device type. Parameters: g (3,), then d (families, 3), in that order."""

    def __init__(self, device_type: str) -> None:
        import numpy as np

        sheet = [
            datasheet.reached(DEVICE_TYPES[device_type], family) for family in datasheet.FAMILIES
        ]
        self._prior = np.log([[one.flops_per_s, one.bytes_per_s, one.latency_s] for one in sheet])
        self._place = {family: number for number, family in enumerate(datasheet.FAMILIES)}
        self._widths = np.array([*GENERAL_WIDTH, *([OWN_WIDTH] * self._prior.size)])

    def seconds(self, probes: Sequence[Probe]) -> Any:
        """The predicted times of these probes, shape (n,), as a function of the parameters."""
        import numpy as np

        rows = [(number, op) for number, one in enumerate(probes) for op in one.ops]
        at = np.array([number for number, _ in rows])
        family = np.array(
            [
                self._place.get(cost_family(op.family, op.dims), self._place["other"])
                for _, op in rows
            ]
        )
        count, flops, moved = (
            np.array([float(getattr(op, name)) for _, op in rows])
            for name in ("count", "flops", "bytes")
        )

        def predicted(parameters: Any) -> Any:
            rate, bandwidth, latency = np.exp(self._constants(parameters)[family]).T
            each = count * (latency + np.maximum(flops / rate, moved / bandwidth))
            return np.bincount(at, each, minlength=len(probes))

        return predicted

    def fit(self, probes: Sequence[Probe]) -> Any:
        """The parameters of highest posterior probability."""
        import numpy as np
        from scipy.optimize import least_squares

        predicted, measured = self.seconds(probes), np.log([one.seconds for one in probes])

        def residuals(parameters: Any) -> Any:
            return np.concatenate(
                [
                    (np.log(predicted(parameters)) - measured)
                    / math.hypot(NOISE, FAMILY_SIGMA, KIND_SIGMA),
                    parameters / self._widths,
                ]
            )

        return least_squares(
            residuals,
            np.zeros(len(self._widths)),
            loss="soft_l1",
            max_nfev=40,
            xtol=1e-4,
            ftol=1e-5,
        ).x

    def made(self, parameters: Any) -> dict[str, Roofline]:
        """Each family's, by name."""
        import numpy as np

        return {
            family: Roofline(
                flops_per_s=float(rate), bytes_per_s=float(bandwidth), latency_s=float(latency)
            )
            for family, (rate, bandwidth, latency) in zip(
                datasheet.FAMILIES, np.exp(self._constants(parameters)), strict=True
            )
        }

    def _constants(self, parameters: Any) -> Any:
        """Logarithms of F, B and a, shape (families, 3)."""
        return self._prior + parameters[:3] + parameters[3:].reshape(self._prior.shape)
