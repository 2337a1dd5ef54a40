"""Fits a calibration to measured steps of networks. Loads no torch.

1. All times are normalised to the machine's median speed, by the sentinel.
2. Operations get their costs (`cost_fit`): without a reference, and with each reference.
3. c, d and e of the step (`predict.calibration`) are fitted if cross-validation shows that this
   helps; else they are 1, 0 and 0.
4. The remaining errors of whole steps correct the costs of operations (`whole_steps`).
5. The costs without a reference are kept, or those with the reference that predicts left-out
   networks best.

Steps 3 and 4 use whole networks only: the step of a single layer is different.

The interval is conformal. q is the 90 % quantile of |ln(measured / predicted)| / σ on networks that
the fit had not seen, although it had seen others of their family (`_left_out` lists the parts that
had seen them). Here the measured time is wall-clock time, not normalised, so the interval includes
the effect of other load. Later it is valid under similar load. The reported error is of networks
whose whole family the fit had not seen, at the machine's median speed. A reference has measured
other networks of the same families; all of them are used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from trainwright.estimator.errors import BusyMachine
from trainwright.estimator.fit.cost_fit import (
    LIKELIHOOD_POINTS,
    ScaledReference,
    device_prior,
    fit_families,
)
from trainwright.estimator.fit.roofline_fit import DevicePrior
from trainwright.estimator.fit.whole_steps import WholeSteps
from trainwright.estimator.frozen_model import FrozenModel
from trainwright.estimator.predict.calibration import (
    Calibration,
    ErrorSummary,
    StepCorrection,
    deviation_of,
)
from trainwright.estimator.predict.machine_speed import Speed
from trainwright.estimator.predict.op_cost import FamilyCost, OpSample, times
from trainwright.estimator.predict.step_work import FamilyWork, InStep, by_family
from trainwright.estimator.quantiles import conformal_quantile, quantile

_INSIDE = 0.9  # the interval's share
_FOLDS = 8
_LEAST_DEVIATION = 0.02


class StepSample(FrozenModel):
    """The seconds of a network's training step, and of each operation within that step."""

    family: str
    single: bool = Field(
        default=False, description="a single layer: used for the costs of operations, not of steps"
    )
    batch_size: int
    seconds: float = Field(description="of a step; for a single layer, the sum of its operations")
    noise: float = Field(
        default=0.0,
        description="the measured standard deviation of the logarithm of `seconds`",
    )
    speed: Speed = Field(description="while the steps were timed")
    ops_speed: Speed = Field(description="while the operations were timed")
    ops: tuple[OpSample, ...]


def drift(samples: Sequence[StepSample]) -> float:
    """The largest spread of a sentinel kernel's time over the samples: (p90 - p10) / median."""
    spreads = []
    for name in Speed.model_fields:
        seen = [float(getattr(one.speed, name)) for one in samples]
        spreads.append((quantile(seen, 0.9) - quantile(seen, 0.1)) / quantile(seen, 0.5))
    return max(spreads)


def refuse_busy(found: float, most_drift: float) -> None:
    """Raise BusyMachine if the machine's speed varied by more than `most_drift`."""
    if found > most_drift:
        raise BusyMachine(
            f"calibrate: the machine was too busy: its speed varied by {100 * found:.0f} % while "
            f"it was measured; allowed: {100 * most_drift:.0f} %; stop other programs on it and "
            "calibrate again, or allow more with --most-drift",
            sentinel_drift=found,
        )


def fit(
    samples: Sequence[StepSample],
    references: Sequence[Calibration] = (),
    likelihood_points: int = LIKELIHOOD_POINTS,
    **facts: Any,
) -> Calibration:
    """The calibration from these measurements, and from the reference that helps most, if any.

    `facts` are the calibration's other fields: of the device (with `device_type` and `threads`) and
    of the session. Raises ValueError without a step of a whole network.
    """
    from threadpoolctl import threadpool_limits

    # The matrices are small: several BLAS threads would only wait for one another.
    with threadpool_limits(limits=1, user_api="blas"):
        return _fit(samples, references, likelihood_points, facts)


def _fit(
    samples: Sequence[StepSample],
    references: Sequence[Calibration],
    likelihood_points: int,
    facts: dict[str, Any],
) -> Calibration:
    import numpy as np

    unit = Speed.median([one.speed for one in samples])
    steps = [_at_median_speed(one, unit) for one in samples]
    whole = [one for one in steps if not one.single]
    if not whole:
        raise ValueError("steps: got none of a whole network; at least one is needed")
    correction, step_deviation = _correction(whole)
    ops = [op for step in steps for op in step.ops]
    prior = device_prior(ops, facts["device_type"], facts["threads"])
    alone = fit_families(ops, prior, likelihood_points=likelihood_points)
    each = [_Lessons(whole, alone, correction, prior)]
    for reference in references:
        scaled = ScaledReference(reference.families, ops)
        costs = fit_families(ops, prior, scaled=scaled)
        each.append(_Lessons(whole, costs, correction, prior, scaled))
    parts = folds(whole)
    in_order = [step for left in parts for step in left]
    found = [
        [one for left in parts for one in _left_out(left, steps, by, step_deviation)] for by in each
    ]
    best = min(
        range(len(each)), key=lambda number: np.mean([abs(error) for error, _ in found[number]])
    )
    slower = {
        id(step): math.log(one.seconds / step.seconds)
        for one, step in zip(samples, steps, strict=True)
    }
    scores = [
        abs(error + slower[id(step)]) / deviation
        for step, (error, deviation) in zip(in_order, found[best], strict=True)
    ]
    families = [
        [one for one in whole if one.family == family]
        for family in sorted({one.family for one in whole})
    ]
    far = [one for left in families for one in _left_out(left, steps, each[best], step_deviation)]
    relative = np.abs([math.exp(-error) - 1 for error, _ in far])
    return Calibration(
        families=each[best].taught(),
        reference=references[best - 1].processor if best > 0 else None,
        kinds=tuple(sorted({op.kind for op in ops})),
        correction=correction,
        measurements=sum(len(one.ops) for one in samples) + len(whole),
        speed=unit,
        sentinel_drift=drift(samples),
        cross_validated_error=ErrorSummary(
            median=float(np.median(relative)), p90=quantile(relative.tolist(), 0.9)
        ),
        step_deviation=step_deviation,
        interval_quantile=conformal_quantile(scores, _INSIDE),
        **facts,
    )


def folds(steps: Sequence[StepSample]) -> list[list[StepSample]]:
    """Divide the steps into parts, each with its share of every family."""
    ordered = sorted(steps, key=lambda one: one.family)
    return [ordered[number::_FOLDS] for number in range(min(_FOLDS, len(ordered)))]


def _correction(steps: Sequence[StepSample]) -> tuple[StepCorrection, float]:
    """The correction of a step, if it helps with left-out families, and the remaining deviation."""
    import numpy as np

    plain: list[float] = []
    corrected: list[float] = []
    for family in sorted({one.family for one in steps}):
        left = _Sums([one for one in steps if one.family == family])
        plain += np.abs(left.errors(StepCorrection())).tolist()
        others = [one for one in steps if one.family != family]
        corrected += np.abs(left.errors(_Sums(others).fit())).tolist() if others else plain
    helps = float(np.mean(corrected)) < float(np.mean(plain))
    # A normal distribution's standard deviation is 1.25 times its mean absolute one.
    deviation = 1.25 * float(np.mean(corrected if helps else plain))
    return (_Sums(steps).fit() if helps else StepCorrection()), max(_LEAST_DEVIATION, deviation)


class _Lessons:
    """Steps, their errors with these costs and correction, and what `WholeSteps` learns."""

    def __init__(
        self,
        steps: Sequence[StepSample],
        costs: dict[str, FamilyCost],
        correction: StepCorrection,
        prior: DevicePrior,
        scaled: ScaledReference | None = None,
    ) -> None:
        import numpy as np

        self.costs, self.correction, self.prior, self.scaled = costs, correction, prior, scaled
        self._learning = WholeSteps(costs)
        self._noise = np.array([one.noise for one in steps])
        self._numbers = {id(one): number for number, one in enumerate(steps)}
        rows, off = [], []
        for step in steps:
            work = _work(step)
            seconds = {family: times(costs, family, each)[0] for family, each in work.items()}
            predicted = _corrected(correction, list(seconds.values()), step)
            shares = {
                family: correction.scale * each / predicted for family, each in seconds.items()
            }
            rows.append(self._learning.row(work, shares))
            off.append(math.log(step.seconds / predicted))
        self._rows, self._off = np.array(rows), np.array(off)

    def taught(self) -> dict[str, FamilyCost]:
        """The costs, corrected by all steps."""
        return self._learning.taught(self._learning.learn(self._rows, self._off, self._noise))

    def left_out(self, left: Sequence[StepSample]) -> Any:
        """ln of the correction of the `left` steps by all other steps alone; shape (left,)."""
        import numpy as np

        places = [self._numbers[id(one)] for one in left]
        others = np.delete(np.arange(len(self._off)), places)
        return self._rows[places] @ self._learning.learn(
            self._rows[others], self._off[others], self._noise[others]
        )


def _left_out(
    left: Sequence[StepSample],
    steps: Sequence[StepSample],
    lessons: _Lessons,
    step_deviation: float,
) -> list[tuple[float, float]]:
    """ln(measured / predicted) and the predicted deviation of steps, by a fit without them.

    The fit of operations, of the correction and of `WholeSteps` leaves them out. Not left out of:
    the kernels, the prior, the choice whether steps are corrected, `step_deviation`, and the costs
    from which `WholeSteps` starts, whose change is computed to first order.
    """
    names = {id(one) for one in left}
    others = [step for step in steps if id(step) not in names]
    ops = [op for step in others for op in step.ops]
    without = fit_families(ops, lessons.prior, like=lessons.costs, scaled=lessons.scaled)
    correction = lessons.correction
    if correction != StepCorrection():
        correction = _Sums([step for step in others if not step.single]).fit()
    found = []
    for step, learned in zip(left, lessons.left_out(left).tolist(), strict=True):
        parts = [times(without, family, each) for family, each in _work(step).items()]
        predicted = _corrected(correction, [seconds for seconds, _ in parts], step)
        found.append(
            (math.log(step.seconds / predicted) - learned, deviation_of(parts, step_deviation))
        )
    return found


def _corrected(correction: StepCorrection, seconds: Sequence[Any], step: StepSample) -> float:
    return float(
        correction(sum(float(each.sum()) for each in seconds), sum(one.count for one in step.ops))
    )


def _at_median_speed(sample: StepSample, unit: Speed) -> StepSample:
    """The sample as if it had been measured at the speed `unit`."""
    step = InStep([(one.kind, one.count, one.bytes, one.dims) for one in sample.ops])
    ops = tuple(
        one.model_copy(
            update={
                "seconds": one.seconds / sample.ops_speed.slower(unit, one.seconds, one.flops),
                "dims": step.sizes(one.kind, one.family, one.dims),
            }
        )
        for one in sample.ops
    )
    flops, calls = (
        sum(one.count * one.flops for one in sample.ops),
        sum(one.count for one in sample.ops),
    )
    seconds = sample.seconds / sample.speed.slower(unit, sample.seconds, flops, calls)
    return sample.model_copy(update={"seconds": seconds, "ops": ops})


class _Sums:
    """Measured steps and the sums of their measured operations, to fit the difference."""

    def __init__(self, steps: Sequence[StepSample]) -> None:
        import numpy as np

        self.ops_s = np.array([sum(one.count * one.seconds for one in step.ops) for step in steps])
        self.counts = np.array([float(sum(one.count for one in step.ops)) for step in steps])
        self.seconds = np.array([step.seconds for step in steps])

    def fit(self) -> StepCorrection:
        """The correction with the least logarithmic errors; outliers have little influence."""
        from scipy.optimize import least_squares

        def made(x: Any) -> StepCorrection:
            return StepCorrection(
                scale=float(x[0]), per_op_s=1e-6 * float(x[1]), fixed_s=1e-6 * float(x[2])
            )

        found = least_squares(
            lambda x: self.errors(made(x)),
            [1.0, 0.0, 0.0],
            bounds=([0.5, -5.0, 0.0], [2.0, 50.0, 1000.0]),
            x_scale=[1.0, 1.0, 100.0],
            loss="soft_l1",
            f_scale=0.1,
        )
        return made(found.x)

    def errors(self, correction: StepCorrection) -> Any:
        """ln(measured / corrected)."""
        import numpy as np

        return np.log(self.seconds / correction(self.ops_s, self.counts))


def _work(step: StepSample) -> dict[str, FamilyWork]:
    return by_family(
        [(one.family, one.kind, one.count, one.flops, one.bytes, one.dims) for one in step.ops]
    )
