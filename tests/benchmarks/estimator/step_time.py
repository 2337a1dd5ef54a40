"""Predicted against measured step time on this machine: `python tests/benchmarks/estimator/step_time.py [--cases N] …`.

Calibrates and probes, then times models of families that calibration does not hold, and with `--in-family` networks of those that
it does: interleaved, in random order, a sentinel round every block. All methods are compared on the same measurements: by
wall-clock, by wall-clock told at the speed of calibration (by the sentinel), and by the CPU time of the thread. The noise floor
(what the halves of the rounds disagree by) stands in the same tables. With `--figure`, predicted against measured as SVG.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import device
import figure
import op_replay
import torch
from timing import CLOCKS, Sentinel, Timed, run_rounds
from zoo import Case, cases

from trainwright.estimator.accuracy import HEADER, Accuracy, noise_floor, percent, quantile, row, summarise, table
from trainwright.estimator.baselines import (
    Predictor,
    datasheet_roofline,
    fit_regression,
    fit_totals,
    torch_roofline,
)
from trainwright.estimator.calibration import Calibration, op_count
from trainwright.estimator.devices import DEVICE_TYPES
from trainwright.estimator.measure import measure
from trainwright.estimator.probe import probe
from trainwright.estimator.step_time import predict_curve
from trainwright.estimator.trace import trace

OURS, FEW, DATASHEET = "trainwright, calibrated", "trainwright, few-shot", "trainwright, datasheet"
MODES = (OURS, FEW, DATASHEET)
REPLAY = "op replay"
BARS = {"held out": ((0.10, 1.5), (0.25, 1.25)), "in family": ((0.06, 1.2), (0.15, 1.1))}
TWO_THREADS = ((0.12, 1.5), (0.28, 1.25))


@dataclass
class Row:
    """A case, what was predicted of it (seconds by method), and what was measured."""

    case: Case
    group: str
    timed: Timed
    predicted: dict[str, float]
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """All that was predicted and measured, as JSON."""
        return {
            "case": self.case.label, "family": self.case.family, "group": self.group, "batch_size": self.case.batch_size,
            "predicted_s": self.predicted, "intervals_s": self.intervals, "rounds_s": self.timed.rounds,
        }  # fmt: skip


def say(message: str) -> None:
    """Progress, beside the result."""
    print(message, file=sys.stderr, flush=True)


def baselines(budget_s: float, threads: int, sentinel: Sentinel) -> dict[str, Predictor]:
    """The other methods, fitted on this machine."""
    steps = device.measured_steps(budget_s, sentinel, say)
    flops_per_s, bytes_per_s = device.peaks()
    say(f"peaks: {flops_per_s / 1e9:.0f} GFLOP/s, {bytes_per_s / 1e9:.1f} GB/s; {len(steps)} steps for the baselines")
    sheet = DEVICE_TYPES["cpu"]
    return {
        "regression of 2019": fit_regression(steps),
        "datasheet roofline": datasheet_roofline(
            threads * sheet.peak_flops["fp32"], threads * sheet.bandwidth_bytes_per_s
        ),
        "torch RuntimeEstimator": torch_roofline(flops_per_s, bytes_per_s),
        "NNLS on totals": fit_totals(steps),
    }


def predicted(
    case: Case, group: str, modes: dict[str, Calibration | None], others: dict[str, Predictor], threads: int
) -> Row:
    """A case with the predictions that need no run of it."""
    structure = trace(case.spec(), case.batch_size)
    found = Row(case, group, Timed(case.step(), device.flops_of(structure, case.batch_size), op_count(structure)), {})
    for name, fitted in modes.items():
        curve = predict_curve(structure, fitted, device_type="cpu", cores=float(threads))
        interval = curve.step_time(case.batch_size)
        found.predicted[name] = interval.median
        found.intervals[name] = (interval.low, interval.high)
    for name, predict in others.items():
        found.predicted[name] = predict(structure, case.batch_size)
    return found


def compare(rows: Sequence[Row], clock: str) -> dict[str, Accuracy]:
    """The accuracy of each method by a clock."""
    measured = [one.timed.seconds(clock) for one in rows]
    noise = [noise_floor(one.timed.rounds[clock]) for one in rows]
    return {
        name: summarise(
            [one.predicted[name] for one in rows],
            measured,
            noise=noise,
            intervals=[one.intervals[name] for one in rows] if name in rows[0].intervals else [],
        )
        for name in rows[0].predicted
    }


def report(group: str, rows: Sequence[Row], clock: str, threads: int) -> None:
    """Print the methods' table, the noise floor in it, and how the bars are met."""
    found = compare(rows, clock)
    ours = found[OURS]
    noise = [noise_floor(one.timed.rounds[clock]) for one in rows]
    floor = (
        "noise floor",
        str(len(rows)),
        percent(ours.noise_median),
        percent(ours.noise_p90),
        "",
        percent(max(noise)),
        "",
    )
    ordered = sorted(found.items(), key=lambda one: one[1].median)
    print(f"\n{group}, {clock}, {threads} thread{'s' if threads > 1 else ''}")
    print(table([HEADER, *(row(name, each) for name, each in ordered), floor]))
    best_name, best = min(((n, a) for n, a in found.items() if n not in MODES), key=lambda one: one[1].median)
    print(f"best baseline: {best_name}, {best.median / ours.median:.2f}x the median error of {OURS}")
    (median, by_median), (p90, by_p90) = TWO_THREADS if threads > 1 and group == "held out" else BARS[group]
    assert ours.noise_median is not None
    assert ours.noise_p90 is not None
    for name, value, bar in (
        ("median", ours.median, max(median, by_median * ours.noise_median)),
        ("p90", ours.p90, max(p90, by_p90 * ours.noise_p90)),
    ):
        print(f"bar: {name} {percent(value)} <= {percent(bar)}: {'met' if value <= bar else 'missed'}")


def report_families(rows: Sequence[Row], clock: str) -> None:
    """Print our accuracy on each family, the worst last."""
    families: dict[str, list[Row]] = defaultdict(list)
    for one in rows:
        families[one.case.family].append(one)
    found = {name: compare(members, clock)[OURS] for name, members in families.items()}
    ordered = sorted(found.items(), key=lambda one: one[1].median)
    print(f"\n{OURS}, by family, {clock}")
    lines = [(*row(name, each), percent(each.noise_median)) for name, each in ordered]
    print(table([("family", *HEADER[1:], "noise"), *lines]))


def panels(rows: Sequence[Row], clock: str) -> list[figure.Panel]:
    """Ours, then the two best of the others."""
    found = compare(rows, clock)
    others = sorted((name for name in found if name not in MODES), key=lambda name: found[name].median)
    return [
        figure.Panel(
            f"{name}: median {percent(found[name].median)}",
            [
                (one.case.family, one.timed.seconds(clock), one.predicted[name], one.intervals.get(name))
                for one in rows
            ],
        )
        for name in (OURS, *others[:2])
    ]  # fmt: skip


def main() -> None:
    """Calibrate, measure, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=90.0, help="for calibrating")
    parser.add_argument("--probe-seconds", type=float, default=20.0, help="for the few-shot mode")
    parser.add_argument("--baseline-seconds", type=float, help="for the baselines' steps (default: as for calibrating)")
    parser.add_argument("--cases", type=int, default=72)
    parser.add_argument("--in-family", type=int, default=0, help="networks of the calibrated families, of other sizes")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="all that was predicted and measured, as JSON")
    parser.add_argument("--figure", type=Path, help="predicted against measured, as SVG")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)

    def listen(message: str, _: float) -> None:
        say(message)

    calibration = measure(given.seconds, given.threads, listen)
    few = probe(given.probe_seconds, "cpu", given.threads, listen)
    sentinel = Sentinel(calibration.speed)
    others = baselines(given.baseline_seconds or given.seconds, given.threads, sentinel)
    drawn = [("held out", one) for one in cases(given.seed, given.cases)]
    drawn += [("in family", one) for one in device.in_family_cases(given.in_family)]
    modes = {OURS: calibration, FEW: few, DATASHEET: None}
    started = time.monotonic()
    rows = [predicted(case, group, modes, others, given.threads) for group, case in drawn]
    say(f"predicted {len(rows)} cases in {time.monotonic() - started:.0f} s")
    timed = [one.timed for one in rows]
    sentinel.seen.clear()
    run_rounds(timed, given.rounds // 2, sentinel, say)
    for one in rows:  # between the halves, so that the machine's drift is shared
        one.predicted[REPLAY] = op_replay.replay(one.case.step())
    run_rounds(timed, given.rounds - given.rounds // 2, sentinel, say)

    ends = [quantile([one.seconds(CLOCKS[0]) for one in timed], share) * 1e3 for share in (0, 0.5, 1)]
    print(
        f"{calibration.processor}, torch {torch.__version__}, calibrated in {calibration.duration_s:.0f} s, "
        f"probed in {few.duration_s:.0f} s"
    )
    print(
        f"steps of {ends[0]:.1f} to {ends[2]:.0f} ms, median {ends[1]:.0f}; the machine meanwhile: {sentinel.summary()}"
    )
    for group in BARS:
        members = [one for one in rows if one.group == group]
        if members:
            for clock in CLOCKS:
                report(group, members, clock, given.threads)
            report_families(members, CLOCKS[1])
    if given.out:
        document = {
            "processor": calibration.processor, "torch": str(torch.__version__), "threads": given.threads,
            "speeds": [one.model_dump() for one in sentinel.seen], "cases": [one.document() for one in rows],
        }  # fmt: skip
        given.out.write_text(json.dumps(document, indent=1))
    if given.figure:
        held_out = [one for one in rows if one.group == "held out"]
        given.figure.write_text(figure.draw(panels(held_out, CLOCKS[1])))


if __name__ == "__main__":
    main()
