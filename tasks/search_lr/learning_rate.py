"""Chooses a learning rate by an exponential ramp and short trials on the real model and data.

The ramp trains while the rate rises exponentially. A polynomial and a logarithm are fitted to the
smoothed loss and accuracy over x = log10(rate). They give an interval, and the rate at which the
loss diverges. Short trials at rates below that (`train.worker.lr_trials`) then find the best rate.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from trainwright.tasks.errors import TrainingFailed
from trainwright.tasks.runs.artefacts.learning_rate_search import (
    CurveFit,
    LearningRatePoint,
    LearningRateSearch,
    LearningRateTrial,
)
from trainwright.tasks.train.worker import lr_trials
from trainwright.tasks.train.worker.lr_curve import course, smooth

if TYPE_CHECKING:
    from trainwright.tasks.train import TrainRequest

STEPS = 90
LADDERS = {"sgd": (1e-4, 10.0), "momentum": (1e-5, 3.0), "adam": (1e-5, 1.0), "adamw": (1e-5, 1.0)}
_DEGREE = 5
_LEARNS = 0.1
"""Learning has begun once the loss has fallen by this share of its whole fall."""


def ladder(low: float, high: float, steps: int) -> list[float]:
    """Rates from low to high, rising by a constant factor."""
    return [low * (high / low) ** (number / (steps - 1)) for number in range(steps)]


def choose(points: Sequence[tuple[float, float, float | None]]) -> LearningRateSearch:
    """Choose an interval and a rate from a ramp's (rate, loss, accuracy), with rising rates.

    The ramp ends at the first loss that is not finite. The interval begins at the rate from which
    the loss stays below its start by a tenth of its whole fall, and ends at the minimum of the
    fitted polynomial. The rate is the middle of the interval on the logarithmic scale. Raises
    TrainingFailed if no loss is finite.
    """
    finite = list(itertools.takewhile(lambda point: math.isfinite(point[1]), points))
    if not finite:
        raise TrainingFailed(
            "search_lr: the loss was not finite from the first step on; "
            "set train.learning_rate in the job"
        )
    rates = [rate for rate, _, _ in finite]
    raw_loss = [value for _, value, _ in finite]
    loss = smooth(raw_loss)
    accuracies = [value for _, _, value in finite if value is not None and math.isfinite(value)]
    accuracy = smooth(accuracies) if len(accuracies) == len(finite) else None
    shown = [
        LearningRatePoint(
            learning_rate=rate,
            loss=raw,
            smoothed_loss=loss[k],
            accuracy=seen,
            smoothed_accuracy=accuracy[k] if accuracy else None,
        )
        for k, (rate, raw, seen) in enumerate(finite)
    ]
    least, begin, noise, gone = course(raw_loss, loss)
    fall = begin - loss[least]
    broken = points[len(finite)][0] if len(finite) < len(points) else None
    diverged_at = rates[gone] if gone is not None else broken
    end = gone if gone is not None else len(rates)
    if len(finite) < 8 or least < 3 or fall <= noise or fall <= 1e-3 * abs(begin):
        return _fallback(shown, rates, diverged_at)
    started = 1 + max((k for k in range(least) if begin - loss[k] < _LEARNS * fall), default=-1)
    fits = _fits(rates, loss, accuracy, end, started, least)
    polynomial = next(fit for fit in fits if fit.curve == "loss" and fit.kind == "polynomial")
    low = rates[started]
    high = min(max(_fitted_minimum(polynomial, low, rates[end - 1]), low), rates[end - 1])
    value = math.sqrt(low * high)
    reason = (
        f"the loss begins to fall at {low:.2g}, and its fitted polynomial has its minimum at "
        f"{high:.2g}; {value:.2g} is the middle between them"
        + (f"; it diverged at {diverged_at:.2g}" if diverged_at is not None else "")
    )
    return LearningRateSearch(
        learning_rate=value,
        interval=(low, high),
        source="searched",
        reason=reason,
        points=shown,
        fits=fits,
        diverged_at=diverged_at,
        plot="lr_search.html",
    )


def _fallback(
    shown: list[LearningRatePoint], rates: list[float], diverged_at: float | None
) -> LearningRateSearch:
    """The middle of the rates that did not diverge, for a ramp whose loss did not fall."""
    low, high = rates[0], max(rates[0], (diverged_at or rates[-1]) / 10)
    value = math.sqrt(low * high)
    return LearningRateSearch(
        learning_rate=value,
        interval=(low, high),
        source="searched",
        points=shown,
        diverged_at=diverged_at,
        reason=(
            f"the loss did not fall by more than its noise; {value:.2g} is the middle of the rates "
            "that did not diverge"
        ),
        plot="lr_search.html",
    )


def _fits(
    rates: list[float],
    loss: list[float],
    accuracy: list[float] | None,
    end: int,
    started: int,
    least: int,
) -> list[CurveFit]:
    """Fit polynomials up to the divergence, and logarithms (lines in x) over the loss's fall."""
    import numpy as np

    fits = []
    curves: list[tuple[Literal["loss", "accuracy"], list[float] | None]] = [
        ("loss", loss),
        ("accuracy", accuracy),
    ]
    ranges: list[tuple[Literal["polynomial", "logarithmic"], int, int, int]] = [
        ("polynomial", 0, end, _DEGREE),
        ("logarithmic", min(started, least - 1), least + 1, 1),
    ]
    for name, values in curves:
        if values is None:
            continue
        for kind, first, last, degree in ranges:
            x, y = np.log10(rates[first:last]), np.array(values[first:last])
            coefficients = np.polyfit(x, y, min(degree, len(x) - 1))
            spread = float(np.sum((y - y.mean()) ** 2))
            left = float(np.sum((y - np.polyval(coefficients, x)) ** 2))
            fits.append(
                CurveFit(
                    curve=name,
                    kind=kind,
                    coefficients=[float(one) for one in coefficients],
                    low=rates[first],
                    high=rates[last - 1],
                    r2=1 - left / spread if spread > 0 else 0.0,
                )
            )
    return fits


def _fitted_minimum(fit: CurveFit, low: float, high: float) -> float:
    """The rate between low and high at which a fitted curve is lowest."""
    import numpy as np

    x = np.linspace(math.log10(low), math.log10(high), 400)
    return float(10 ** x[int(np.argmin(np.polyval(fit.coefficients, x)))])


def search_learning_rate(
    request: TrainRequest, *, stop: threading.Event | None = None
) -> LearningRateSearch:
    """Run ramp and trials on the job's own model, data and split, and choose a rate."""
    from trainwright.tasks.train import search

    job, rows = request.job.train, request.schema_.train_rows
    low, high = LADDERS[job.optimizer.name]
    steps = lr_trials.trial_steps(math.ceil(rows / request.plan.global_batch_size) * job.epochs)
    found = search(request, ladder(low, high, STEPS), steps, stop=stop)
    points = [(one.learning_rate, one.loss, one.accuracy) for one in found.points]
    return with_trials(choose(points), found.trials)


def with_trials(
    ramp: LearningRateSearch, trials: Sequence[LearningRateTrial]
) -> LearningRateSearch:
    """Complete a search by its trials; the ramp's rate stays if none was run or all diverged."""
    settled = lr_trials.settle({one.learning_rate: one.loss for one in trials})
    if settled is None:
        return ramp.model_copy(update={"trials": list(trials)})
    value, (low, high) = settled
    best = min(trials, key=lambda one: one.loss)
    rates = sorted(one.learning_rate for one in trials)
    diverged = (
        f" (the ramp's loss diverged at {ramp.diverged_at:.2g})"
        if ramp.diverged_at is not None
        else ""
    )
    reason = (
        f"of {len(trials)} trainings of {best.steps} steps at rates from {rates[0]:.2g} to "
        f"{rates[-1]:.2g}{diverged}, {best.learning_rate:.2g} reached the lowest loss "
        f"({best.loss:.3g})"
    )
    if value != best.learning_rate:
        reason += f"; a parabola through it and its neighbours has its minimum at {value:.2g}"
    return ramp.model_copy(
        update={
            "learning_rate": value,
            "interval": (low, high),
            "reason": reason,
            "trials": list(trials),
        }
    )
