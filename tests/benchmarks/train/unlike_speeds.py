"""Throughput on devices of unlike speeds against the ideal, by split: in proportion to the speeds, and even.

    python tests/benchmarks/train/unlike_speeds.py [--speeds 2:1 --speeds 4:2:1:1] [--steps 100] [--rounds 3] [--backend torch]

Emulated devices take EMULATED_SAMPLE_S / speed for a sample; collectives, the optimizer and the loop are real. Ideal: every
device always at its speed, and nothing else. Rounds interleave the ways in random order; the proportional split runs twice in
each, and by how much the two differ is the noise floor. The bar is 95 % of the ideal.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from pathlib import Path

from pace import asked_for, middle, paced, samples_per_s

from trainwright.estimator.devices import EMULATED_SAMPLE_S

SAMPLES_PER_SPEED = 64
"""A step of the ideal takes 64 ms."""


def share_of_ideal(speeds: list[float], split: list[int], steps: int, backend: str) -> float:
    """Throughput of one training, as a share of the ideal."""
    devices = [{"type": "emulated", "speed": speed} for speed in speeds]
    with tempfile.TemporaryDirectory() as folder:
        asked = asked_for(Path(folder), split, devices, steps, backend=backend)
        seen, _ = paced(asked)
    return samples_per_s(seen, sum(split)) * EMULATED_SAMPLE_S / sum(speeds)


def main() -> None:
    """Measure, and print a line for each set of speeds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--speeds", action="append")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--backend", default="torch")
    asked = parser.parse_args()
    for text in asked.speeds or ["2:1", "4:2:1:1"]:
        speeds = [float(one) for one in text.split(":")]
        own = [round(SAMPLES_PER_SPEED * speed) for speed in speeds]
        each, rest = divmod(sum(own), len(own))
        even = [each + (at < rest) for at in range(len(own))]
        found: dict[str, list[float]] = {"proportional": [], "again": [], "even": []}
        for _ in range(asked.rounds):
            for way in random.sample(sorted(found), len(found)):
                split = even if way == "even" else own
                found[way].append(share_of_ideal(speeds, split, asked.steps, asked.backend))
        both = found["proportional"] + found["again"]
        floor = statistics.median(abs(a - b) for a, b in zip(found["proportional"], found["again"], strict=True))
        bound = (sum(own) / sum(speeds)) / max(size / speed for size, speed in zip(even, speeds, strict=True))
        print(
            f"speeds {text}: split {own} reaches {middle(both)} of the ideal (bar 0.95), noise floor {floor:.3f}; "
            f"even split {middle(found['even'])}, which could reach {bound:.3f}; gain "
            f"{statistics.median(both) / statistics.median(found['even']):.2f} of {1 / bound:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
