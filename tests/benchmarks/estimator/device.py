"""The device under test: its calibration, steps to fit the baselines, and its peaks."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
from baselines import MeasuredStep
from timing import Sentinel, time_steps
from zoo import Case

from trainwright.estimator.measure.networks.benchmark import BenchmarkNetwork, networks
from trainwright.estimator.predict.calibration import Calibration, load, op_count
from trainwright.estimator.structure import Structure
from trainwright.estimator.trace.trace import trace

Say = Callable[[str], None]
_SEED = 0  # the networks that calibration itself measures
_OTHER_SEED = 1_000_003
_LONGEST_STEP_S = 0.4


def calibrated(seconds: float, threads: int, *more: str) -> Calibration:
    """This CPU's calibration, measured in a separate process as by `trainwright calibrate`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cpu.json"
        numbers = [f"--budget={seconds}", f"--threads={threads}", "--most-drift=inf"]
        subprocess.run(
            [
                sys.executable,
                "-m",
                "trainwright.estimator.measure.measure_device",
                "--out",
                path,
                *numbers,
                *more,
            ],
            check=True,
        )
        return load(path)


def _cases(seed: int) -> Iterator[Case]:
    for number, one in enumerate(_whole(seed)):
        yield Case(
            f"in family: {one.family}",
            str(number),
            one.build,
            one.example_batch,
            one.loss,
            one.batch_size,
            one.optimizer,
        )


def _whole(seed: int) -> Iterator[BenchmarkNetwork]:
    return (one for one in networks(seed) if not one.single)


def in_family_cases(count: int, seed: int = 0) -> list[Case]:
    """Networks of the families that calibration measures, in other sizes."""
    return list(islice(_cases(_OTHER_SEED + seed), count))


def measured_steps(budget_s: float, sentinel: Sentinel, say: Say) -> list[MeasuredStep]:
    """Steps of calibration's networks, timed until the budget is used.

    Times are normalised to the speed at calibration.
    """
    started = time.monotonic()
    found: list[MeasuredStep] = []
    for case in _cases(_SEED):
        if time.monotonic() - started > budget_s and len(found) > 3:
            break
        batch = case.batch_size
        structure = trace(case.spec(), batch)
        while True:
            step = replace(case, batch_size=batch).step()
            step()
            first = time.perf_counter()
            step()
            if time.perf_counter() - first < _LONGEST_STEP_S or batch <= 2:
                break
            batch //= 2
        before = sentinel()
        seconds, _ = time_steps(step)
        step_s = sentinel.normalised(
            seconds, flops_of(structure, batch), op_count(structure), before, sentinel()
        )
        found.append(MeasuredStep(structure, batch, step_s))
        say(
            f"{len(found)} steps for the baselines, {time.monotonic() - started:.0f} of "
            f"{budget_s:.0f} s"
        )
    return found


def flops_of(structure: Structure, batch_size: int) -> float:
    """FLOPs of a whole training step."""
    return sum(one.count * one.flops(batch_size) for one in structure.trace)


def peaks() -> tuple[float, float]:
    """The best FLOP/s of a large matrix product, and bytes/s (read and written) of a large copy."""
    left, right = torch.rand(1024, 1024), torch.rand(1024, 1024)
    source, target = torch.rand(2**25), torch.empty(2**25)
    product = min(_seconds(lambda: torch.mm(left, right)) for _ in range(8))
    copy = min(_seconds(lambda: target.copy_(source)) for _ in range(8))
    return 2 * 1024**3 / product, 2 * source.nbytes / copy


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
