"""The correction by finished runs: `python tests/benchmarks/estimator/learning.py [--models N] …`.

Calibrates, then trains models of families that calibration does not measure, each at several batch
sizes, as a sequence of short runs in random order. Before each run, a learning and a plain
predictor predict its step; after it, the learning one gets the result. The tables show the error of
both by thirds of the sequence, for models that ran before and for new ones; for a machine that
becomes slower half way; and for the same runs in other orders, to remove chance. They also show the
noise floor, the difference between the halves of a run. For intervals: the share that contains the
measurement, and the ratio of their ends.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import device
import torch
from accuracy import noise_floor, percent, table
from zoo import Case, cases

from trainwright.estimator.curves import DeviceCurve, Interval
from trainwright.estimator.predict.calibration import load
from trainwright.estimator.predict.correction import Finding, FinishedRun, learn
from trainwright.estimator.predict.step_time import predict_curve
from trainwright.estimator.quantiles import quantile
from trainwright.estimator.trace.trace import trace

ORDERS = 20
THIRDS = ("first third", "second third", "last third")
QUARTERS = ("first quarter", "second", "third: slower from here", "last quarter")
LEAST_STEPS = 8


@dataclass
class Trained:
    """A run: its prediction by the calibration alone, and the seconds of its steps."""

    case: Case
    curve: DeviceCurve
    steps_s: list[float]

    @property
    def seconds(self) -> float:
        """The median step."""
        return statistics.median(self.steps_s)

    def finding(self, number: int) -> FinishedRun:
        """The finding that step `store` would append."""
        assert self.curve.basis is not None
        low, median, high = (quantile(self.steps_s, share) for share in (0.05, 0.5, 0.95))
        size = self.case.batch_size
        memory = self.curve.memory_bytes(size)  # ranks of one process: not measured
        found = Finding(
            basis=self.curve.basis,
            cores=self.curve.cores,
            batch_size=size,
            steps=len(self.steps_s),
            predicted_step_time_s=self.curve.step_time(size).median,
            measured_step_time_s=Interval(low=low, median=median, high=high),
            memory_batch_size=size,
            predicted_peak_memory_bytes=memory,
            measured_peak_memory_bytes=memory,
        )
        return FinishedRun(run=f"{number:06d}", device_type="cpu", findings=(found,))

    def noise(self) -> float:
        """The difference between the medians of its two halves."""
        return noise_floor(self.steps_s)


@dataclass
class Outcome:
    """One run of a sequence: both predictions, made before it."""

    trained: Trained
    plain: Interval
    learned: Interval
    seen_before: bool

    def error(self, learning: bool) -> float:
        """|predicted - measured| / measured."""
        predicted = self.learned if learning else self.plain
        return abs(predicted.median / self.trained.seconds - 1)

    def inside(self, learning: bool) -> bool:
        """Whether the interval contains the measurement."""
        predicted = self.learned if learning else self.plain
        return predicted.low <= self.trained.seconds <= predicted.high

    def width(self, learning: bool) -> float:
        """The interval's ends, as a ratio."""
        predicted = self.learned if learning else self.plain
        return predicted.high / predicted.low


def drawn(seed: int, models: int, batches: int) -> list[Case]:
    """Each model at several batch sizes, shuffled."""
    made = [
        replace(one, batch_size=max(1, one.batch_size * 2**power // 2))
        for one in cases(seed, models)
        for power in range(batches)
    ]
    random.Random(seed).shuffle(made)
    return made


def train(case: Case, curve: DeviceCurve, seconds: float) -> Trained:
    """Run steps for a while, each timed as ranks time their own work."""
    step = case.step()
    step()
    taken: list[float] = []
    started = time.perf_counter()
    while time.perf_counter() - started < seconds or len(taken) < LEAST_STEPS:
        before = time.perf_counter()
        step()
        taken.append(time.perf_counter() - before)
    return Trained(case, curve, taken)


def sequence(
    runs: Sequence[Callable[[], Trained]] | Sequence[Trained],
    curves: Sequence[DeviceCurve],
    batches: Sequence[int],
) -> list[Outcome]:
    """For each run: predict it, run it, and pass the result to the predictor."""
    findings: list[FinishedRun] = []
    models: set[str] = set()
    found = []
    for number, (run, curve, size) in enumerate(zip(runs, curves, batches, strict=True)):
        assert curve.basis is not None
        plain, learned = curve.step_time(size), learn(curve, findings).step_time(size)
        trained = run if isinstance(run, Trained) else run()
        found.append(Outcome(trained, plain, learned, curve.basis.model in models))
        findings.append(trained.finding(number))
        models.add(curve.basis.model)
    return found


def again(outcomes: Sequence[Outcome], seed: int) -> list[Outcome]:
    """The same runs in another order."""
    runs = [one.trained for one in outcomes]
    random.Random(seed).shuffle(runs)
    return sequence(runs, [one.curve for one in runs], [one.case.batch_size for one in runs])


def slowed(outcomes: Sequence[Outcome], by: float) -> list[Outcome]:
    """The same runs, with the later half slowed down by the factor `by`."""
    half = len(outcomes) // 2
    runs = [
        replace(
            one.trained,
            steps_s=[seconds * (by if number >= half else 1.0) for seconds in one.trained.steps_s],
        )
        for number, one in enumerate(outcomes)
    ]
    return sequence(runs, [one.curve for one in runs], [one.case.batch_size for one in runs])


def parts(outcomes: Sequence[Outcome], names: Sequence[str]) -> dict[str, list[Outcome]]:
    """The sequence in equal parts."""
    ends = [round(len(outcomes) * part / len(names)) for part in range(len(names) + 1)]
    return {name: list(outcomes[a:b]) for name, (a, b) in zip(names, pairwise(ends), strict=True)}


def lines(named: dict[str, list[Outcome]]) -> list[tuple[str, ...]]:
    """One row of figures per part."""
    made = []
    for name, part in named.items():
        if not part:
            continue
        cells = [
            name,
            str(len(part)),
            percent(statistics.median(one.trained.noise() for one in part)),
        ]
        for learning in (False, True):
            errors = [one.error(learning) for one in part]
            cells += [percent(statistics.median(errors)), percent(statistics.fmean(errors))]
        for learning in (False, True):
            cells.append(percent(statistics.fmean(one.inside(learning) for one in part)))
            cells.append(
                f"{math.exp(statistics.fmean(math.log(one.width(learning)) for one in part)):.2f}x"
            )
        made.append(tuple(cells))
    return made


HEADER = (
    "runs",
    "n",
    "noise",
    "plain median",
    "mean",
    "learning median",
    "mean",
    "plain inside",
    "width",
    "learning inside",
    "width",
)


def main() -> None:
    """Calibrate, then run the sequence."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=75.0, help="seconds to calibrate")
    parser.add_argument("--calibration", type=Path, help="an existing calibration to use")
    parser.add_argument("--out", type=Path, help="write each run's finding as JSON lines")
    parser.add_argument("--models", type=int, default=7)
    parser.add_argument(
        "--batches", type=int, default=3, help="batch sizes per model, by factors of two"
    )
    parser.add_argument("--run-seconds", type=float, default=3.0)
    parser.add_argument(
        "--slower", type=float, default=1.5, help="slow-down of the machine half way"
    )
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    calibration = (
        load(given.calibration, torch.__version__)
        if given.calibration
        else device.calibrated(given.seconds, 1)
    )
    chosen = drawn(given.seed, given.models, given.batches)
    curves = [
        predict_curve(trace(one.spec(), one.batch_size), calibration, device_type="cpu", cores=1.0)
        for one in chosen
    ]
    runs = [
        lambda case=case, curve=curve: train(case, curve, given.run_seconds)
        for case, curve in zip(chosen, curves, strict=True)
    ]
    outcomes = sequence(runs, curves, [one.batch_size for one in chosen])
    if given.out:
        findings = [
            one.trained.finding(number).model_dump_json() for number, one in enumerate(outcomes)
        ]
        given.out.write_text("\n".join(findings) + "\n")
    rows = [
        (
            str(number),
            one.trained.case.label,
            f"{1e3 * one.trained.seconds:.1f}",
            percent(one.trained.noise()),
            percent(one.error(False)),
            percent(one.error(True)),
            "yes" if one.seen_before else "",
        )
        for number, one in enumerate(outcomes, start=1)
    ]
    print(
        table(
            [
                ("run", "model", "measured ms", "noise", "plain", "learning", "model ran before"),
                *rows,
            ]
        )
    )
    shuffled = [again(outcomes, seed) for seed in range(ORDERS)]
    print(f"\nin the order in which they ran ({calibration.processor}, torch {torch.__version__})")
    before = {
        "model ran before": [one for one in outcomes if one.seen_before],
        "another model": [one for one in outcomes if not one.seen_before],
    }
    print(table([HEADER, *lines(parts(outcomes, THIRDS) | before)]))
    print(
        f"\nthe same runs, the later half as if the machine took {given.slower:g}x as long "
        "(arithmetic, not measured)"
    )
    print(table([HEADER, *lines(parts(slowed(outcomes, given.slower), QUARTERS))]))
    print(f"\nthe same runs in {ORDERS} other orders")
    found: dict[str, list[Outcome]] = {}
    for one in shuffled:
        for name, part in parts(one, THIRDS).items():
            found.setdefault(name, []).extend(part)
    every = [each for one in shuffled for each in one]
    found["model ran before"] = [one for one in every if one.seen_before]
    found["another model"] = [one for one in every if not one.seen_before]
    print(table([HEADER, *lines(found)]))


if __name__ == "__main__":
    main()
