"""Predicted against measured step time: `python tests/benchmarks/estimator/step_time.py …`.

Calibrates twice, with the full and with a small budget (few-shot). Then it times models of families
that calibration does not measure, and with `--in-family` networks of those that it does: in blocks,
in random order, with a sentinel around each block. All methods are compared on the same
measurements: by wall-clock, by wall-clock normalised to the speed at calibration (by the sentinel),
and by the thread's CPU time. The tables also have the noise floor (the difference between the
halves of the rounds) and the difference between the medians of two processes: each case is timed in
a second process in turns (`--one-process` leaves that out).

A long session can be split into pieces with different seeds; `--report` combines them:

    for seed in 1 2 3; do step_time.py --seed $seed --cases 40 --out cases.jsonl; done
    step_time.py --report cases.jsonl --figure cases.svg

Intervals need many cases: `--calibration FILE --alone` leaves out calibrating and other methods.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from functools import partial
from pathlib import Path

import device
import figure
import op_replay
import torch
from baselines import (
    Predictor,
    datasheet_roofline,
    fit_regression,
    fit_totals,
    torch_roofline,
)
from other_process import OtherProcess, drawn
from step_time_report import DATASHEET, FEW, OURS, Piece, Row, panels, report
from timing import Sentinel, Timed, run_rounds
from zoo import Case

from trainwright.estimator.devices import DEVICE_TYPES
from trainwright.estimator.predict.calibration import Calibration, load, op_count
from trainwright.estimator.predict.step_time import predict_curve
from trainwright.estimator.trace.trace import trace

REPLAY = "op replay"


def say(message: str) -> None:
    """Print progress on standard error."""
    print(message, file=sys.stderr, flush=True)


def baselines(budget_s: float, threads: int, sentinel: Sentinel) -> dict[str, Predictor]:
    """The other methods, fitted on this machine."""
    steps = device.measured_steps(budget_s, sentinel, say)
    flops_per_s, bytes_per_s = device.peaks()
    say(
        f"peaks: {flops_per_s / 1e9:.0f} GFLOP/s, {bytes_per_s / 1e9:.1f} GB/s; "
        f"{len(steps)} steps for the baselines"
    )
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
    case: Case,
    group: str,
    modes: dict[str, Calibration | None],
    others: dict[str, Predictor],
    threads: int,
) -> tuple[Row, Timed]:
    """A case with the predictions that need no run of it, and its step to time."""
    structure, size = trace(case.spec(), case.batch_size), case.batch_size
    intervals = {}
    for name, fitted in modes.items():
        curve = predict_curve(structure, fitted, device_type="cpu", cores=float(threads))
        intervals[name] = curve.step_time(size)
    row = Row(
        label=case.label,
        family=case.family,
        group=group,
        batch_size=size,
        predicted_s={name: one.median for name, one in intervals.items()}
        | {name: predict(structure, size) for name, predict in others.items()},
        intervals_s={name: (one.low, one.high) for name, one in intervals.items()},
    )
    return row, Timed(case.step(), device.flops_of(structure, size), op_count(structure))


def measured(given: argparse.Namespace) -> Piece:
    """Calibrate, predict, time."""
    torch.set_num_threads(given.threads)
    calibration = (
        load(given.calibration, torch.__version__)
        if given.calibration
        else device.calibrated(given.seconds, given.threads)
    )
    sentinel = Sentinel(calibration.speed)
    modes: dict[str, Calibration | None] = {OURS: calibration}
    others: dict[str, Predictor] = {}
    if not given.alone:
        modes[FEW] = device.calibrated(given.probe_seconds, given.threads, "--mode=few-shot")
        modes[DATASHEET] = None
        others = baselines(given.baseline_seconds or given.seconds, given.threads, sentinel)
    chosen = drawn(given.seed, given.cases, given.in_family)
    started = time.monotonic()
    made = [predicted(case, group, modes, others, given.threads) for group, case in chosen]
    say(f"predicted {len(made)} cases in {time.monotonic() - started:.0f} s")
    timed = [one for _, one in made]
    with contextlib.ExitStack() as stack:
        if not given.one_process:
            other = stack.enter_context(
                OtherProcess(given.threads, given.seed, given.cases, given.in_family)
            )
            for number, one in enumerate(timed):
                one.elsewhere = partial(other, number)
        sentinel.seen.clear()
        run_rounds(timed, given.rounds // 2, sentinel, say)
        if not given.alone:  # between the halves, so that both share the machine's drift
            for (_, case), (row, _) in zip(chosen, made, strict=True):
                row.predicted_s[REPLAY] = op_replay.replay(case.step())
        run_rounds(timed, given.rounds - given.rounds // 2, sentinel, say)
    for row, one in made:
        row.rounds_s, row.elsewhere_s = one.rounds, one.rounds_elsewhere
    return Piece(
        processor=calibration.processor,
        torch=str(torch.__version__),
        threads=given.threads,
        seed=given.seed,
        calibrated_in_s=calibration.duration_s,
        machine=sentinel.summary(),
        rows=[row for row, _ in made],
    )


def main() -> None:
    """Calibrate, measure, compare; or compare earlier measurements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=90.0, help="seconds to calibrate")
    parser.add_argument("--calibration", type=Path, help="an existing calibration to use")
    parser.add_argument(
        "--alone", action="store_true", help="no few-shot mode, no datasheet, no baselines"
    )
    parser.add_argument(
        "--probe-seconds", type=float, default=20.0, help="seconds of the few-shot mode"
    )
    parser.add_argument(
        "--baseline-seconds",
        type=float,
        help="seconds for the baselines' steps (default: as for calibrating)",
    )
    parser.add_argument("--cases", type=int, default=72)
    parser.add_argument(
        "--in-family",
        type=int,
        default=0,
        help="use networks of the calibrated families, in other sizes",
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument(
        "--one-process", action="store_true", help="don't time the cases in a second process"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out",
        type=Path,
        help="append all predictions and measurements to this file, as a line of JSON",
    )
    parser.add_argument(
        "--report", type=Path, help="measure nothing: combine the pieces in this file"
    )
    parser.add_argument("--figure", type=Path, help="predicted against measured, as SVG")
    given = parser.parse_args()
    if given.report:
        pieces = [Piece.read(json.loads(line)) for line in given.report.read_text().splitlines()]
    else:
        pieces = [measured(given)]
        if given.out:
            with given.out.open("a") as file:
                file.write(json.dumps(pieces[0].document()) + "\n")
    report(pieces)
    if given.figure:
        given.figure.write_text(figure.draw(panels(pieces)))


if __name__ == "__main__":
    main()
