"""Throughput on devices of different speeds, as a share of the ideal: proportional and even split.

    python tests/benchmarks/train/unlike_speeds.py [--speeds 2:1 --speeds 4:2:1:1]
        [--ms 64 --ms 256] [--seconds 7] [--rounds 5]

Emulated devices take EMULATED_SAMPLE_S / speed per sample; sums, the optimizer and the loop are
real. Ideally, every device is always busy at its speed. The overhead is about the same for every
step, so it is measured for several ideal step times (`--ms`). An epoch has 25 steps; its validation
counts as lost. Rounds run the splits in random order, the proportional one twice; the difference of
those two is the noise floor. The bar is 95 % of the ideal. Also printed: the parts of a step, as
the ranks recorded them.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

from pace import asked_for, middle, paced, samples_per_s
from training_case import rows

from trainwright.estimator.devices import EMULATED_SAMPLE_S

EPOCH_STEPS = 25
PARTS = ("compute_s", "wait_s", "communication_s", "step_time_s")


def share_of_ideal(
    speeds: list[float], split: list[int], steps: int, backend: str
) -> tuple[float, list[dict[str, Any]]]:
    """One training's throughput as a share of the ideal, and the rows of the first rank."""
    devices = [{"type": "emulated", "speed": speed} for speed in speeds]
    with tempfile.TemporaryDirectory() as folder:
        asked = asked_for(
            Path(folder), split, devices, steps, epoch_steps=EPOCH_STEPS, backend=backend
        )
        seen, _ = paced(asked)
        recorded = rows(asked, "steps-rank0")
    rate = samples_per_s(seen, sum(split), rows=EPOCH_STEPS * sum(split))
    return rate * EMULATED_SAMPLE_S / sum(speeds), recorded


def breakdown(recorded: list[dict[str, Any]]) -> str:
    """The median parts of a step."""
    parts = {name: 1e3 * statistics.median(row[name] for row in recorded) for name in PARTS}
    listed = ", ".join(
        f"{name.removesuffix('_s').replace('_', ' ')} {value:.1f}" for name, value in parts.items()
    )
    return f"a step by rank 0, in ms: {listed}"


def main() -> None:
    """Measure, and print a line for each set of speeds and step time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--speeds", action="append")
    parser.add_argument("--ms", type=int, action="append")
    parser.add_argument(
        "--seconds", type=float, default=7.0, help="ideal duration of each training"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--backend", default="torch")
    asked = parser.parse_args()
    for text in asked.speeds or ["2:1", "4:2:1:1"]:
        speeds = [float(one) for one in text.split(":")]
        for step_ms in asked.ms or [64, 256]:
            measured(text, speeds, step_ms, asked)


def measured(text: str, speeds: list[float], step_ms: int, asked: argparse.Namespace) -> None:
    """Measure one set of speeds and one step time, and print a line."""
    own = [round(step_ms * 1e-3 * speed / EMULATED_SAMPLE_S) for speed in speeds]
    each, rest = divmod(sum(own), len(own))
    even = [each + (at < rest) for at in range(len(own))]
    steps = round(1e3 * asked.seconds / step_ms)
    found: dict[str, list[float]] = {"proportional": [], "again": [], "even": []}
    recorded: list[dict[str, Any]] = []
    for _ in range(asked.rounds):
        for way in random.sample(sorted(found), len(found)):
            share, seen = share_of_ideal(
                speeds, even if way == "even" else own, steps, asked.backend
            )
            found[way].append(share)
            recorded += seen if way != "even" else []
    both = found["proportional"] + found["again"]
    floor = statistics.median(
        abs(a - b) for a, b in zip(found["proportional"], found["again"], strict=True)
    )
    bound = (sum(own) / sum(speeds)) / max(
        size / speed for size, speed in zip(even, speeds, strict=True)
    )
    print(
        f"speeds {text}, steps of {step_ms} ms: split {own} reaches {middle(both)} of the ideal "
        f"(bar 0.95), noise floor {floor:.3f}; even split {middle(found['even'])}, at best "
        f"{bound:.3f}; gain {statistics.median(both) / statistics.median(found['even']):.2f} of "
        f"{1 / bound:.2f}; {breakdown(recorded)}",
        flush=True,
    )


if __name__ == "__main__":
    main()
