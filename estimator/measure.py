"""Measures this machine: `python -m trainwright.estimator.measure --out FILE --budget S --threads N`. Heavy: torch.

Cases run in random order, rounds interleaved, each round between two runs of a sentinel kernel: what the machine drifts meanwhile
shows in the sentinel, and each time is corrected by the sentinels beside it. The median over rounds counts.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch  # noqa: TID253 - this is a process of its own

from trainwright.estimator.benchmark import NetworkCase, network_cases, op_cases
from trainwright.estimator.calibration import Calibration, OpMeasurement, StepMeasurement, fit, save
from trainwright.estimator.source import BatchSpec, ModelDefinition
from trainwright.estimator.trace import StepSpec, trace

_LEAST_S = 2e-3  # of work timed at once
_MOST_REPEATS = 2000
_OPTIMIZER = {"name": "adamw", "weight_decay": 0.01}
Say = Callable[[str], None]


def processor() -> str:
    """The CPU's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _repeat(run: Callable[[], Any], repeats: int) -> float:
    started = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - started) / repeats


class _Case:
    """Something to time: how often at once, and what it took in each round, in sentinels."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self.run = run
        run()
        once = max(_repeat(run, 2), 1e-7)
        self.repeats = max(1, min(_MOST_REPEATS, int(_LEAST_S / once)))
        self.times: list[float] = []

    def measure(self) -> float:
        return _repeat(self.run, self.repeats)


def measure(budget_s: float, threads: int, say: Say, seed: int = 0) -> Calibration:
    """Measure until the budget is used, at least two rounds; the calibration."""
    torch.set_num_threads(threads)
    started = time.monotonic()
    left, right = torch.rand(192, 192), torch.rand(192, 192)
    sentinel = _Case(lambda: left @ right)
    ops = op_cases(seed)
    say(f"preparing {len(ops)} operations and networks")
    networks = network_cases(seed)
    structures = [_structure(case) for case in networks]
    cases = [_Case(case.run) for case in ops] + [_Case(_stepper(case)) for case in networks]
    order, draw, sentinels, rounds = list(range(len(cases))), random.Random(seed), list[float](), 0
    while rounds < 2 or time.monotonic() - started < budget_s:
        draw.shuffle(order)
        before = sentinel.measure()
        for place, number in enumerate(order):
            taken = cases[number].measure()
            after = before
            if place % 8 == 7:
                after = sentinel.measure()
                sentinels.append(after)
            cases[number].times.append(taken / ((before + after) / 2))
            before = after
            if rounds >= 2 and time.monotonic() - started > budget_s:
                break
        rounds += 1
        say(f"round {rounds}, {time.monotonic() - started:.0f} of {budget_s:.0f} s")
    unit = statistics.median(sentinels)
    seconds = [statistics.median(case.times) * unit for case in cases]
    spread = statistics.quantiles(sentinels, n=10)
    return fit(
        [
            OpMeasurement(family=case.family, flops=case.flops, bytes=case.bytes, seconds=taken)
            for case, taken in zip(ops, seconds, strict=False)
        ],
        [
            StepMeasurement(family=case.family, batch_size=case.batch_size, structure=structure, seconds=taken)
            for case, structure, taken in zip(networks, structures, seconds[len(ops) :], strict=True)
        ],
        sentinel_drift=(spread[-1] - spread[0]) / unit,
        device_type="cpu",
        threads=threads,
        dtype="fp32",
        torch=importlib.metadata.version("torch"),
        processor=processor(),
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        duration_s=time.monotonic() - started,
    )


def _structure(case: NetworkCase) -> Any:
    spec = BatchSpec(
        inputs={"inputs": case.input_shape}, input_dtypes={"inputs": "float32"}, target_dtype="int64", classes=case.classes,
        task="image-classification",
    )  # fmt: skip
    definition = ModelDefinition(case.build, None, None)
    return trace(StepSpec(definition, {}, spec, _OPTIMIZER, "fp32"), case.batch_size)


def _stepper(case: NetworkCase) -> Callable[[], None]:
    """A training step as the ranks do it: new gradients each time, AdamW."""
    torch.manual_seed(0)
    model = case.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
    inputs = torch.rand(case.batch_size, *case.input_shape)
    targets = torch.randint(0, case.classes, (case.batch_size,))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    step()
    return step


def main() -> int:
    """Measure, write the file, print progress as JSON lines on stderr."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, required=True)
    parser.add_argument("--threads", type=int, required=True)
    given = parser.parse_args()

    def say(message: str) -> None:
        sys.stderr.write(json.dumps({"message": message}) + "\n")
        sys.stderr.flush()

    save(measure(given.budget, given.threads, say), given.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
