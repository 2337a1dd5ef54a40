"""The adaptive split while device speeds change, and while they only fluctuate.

    python tests/benchmarks/train/changing_speeds.py [--case "2:1>1:2" ...] [--rounds 5]
        [--noise 0.15] [--seed 0] [--no-change] [--no-noise]

The ranks are real processes; the model sleeps SAMPLE_S / speed per sample. It reads the speeds from
a file, which this program rewrites during the run. The ideal is that all devices are always busy at
their current speed; an epoch has 25 steps, and its validation counts as lost.

Bars: 93 % of the new ideal within 3 changes of the split. With step times that fluctuate by 15 %,
at most 1 change in 100 steps, and no loss against a static split. (The static split runs twice per
round, in random order; the difference of the two runs is the noise floor.) Each window between two
changes has its share of the ideal. What counts is the last window at each speed, and the number of
changes before it, not the best window.

All trainings of a round fluctuate identically, step by step. With independent draws, the means of
200 steps would differ by 0.7 % (standard deviation) between trainings. Round n uses `--seed` + n.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from pace import NEVER, asked_for, middle, paced, samples_per_s

SAMPLE_S = 1e-3
SAMPLES_PER_SPEED = 96
WARM_UP_STEPS, BEFORE_STEPS, AFTER_STEPS = 10, 60, 200
EPOCH_STEPS = 25
NET = """
import json
import os
import random
import time

import torch


class Net(torch.nn.Sequential):
    def __init__(self, file, noise, sample_s, draws):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, 10))
        self.file, self.noise, self.sample_s = file, noise, sample_s
        self.draw = random.Random(f"{draws} {os.environ.get('HOROVOD_RANK')}")

    def forward(self, images):
        if self.training:
            with open(self.file) as file:
                speed = json.load(file)[int(os.environ["HOROVOD_RANK"])]
            factor = 1 + self.draw.uniform(-self.noise, self.noise)
            time.sleep(len(images) * self.sample_s / speed * factor)
        return super().forward(images)


def build_model(file, noise, sample_s, draws):
    return Net(file, noise, sample_s, draws)
"""


def made(
    folder: Path, speeds: list[float], steps: int, noise: float, *, adapts: bool, draws: int = 0
) -> tuple[Any, Path]:
    """A training with a split in proportion to these speeds, and the file with the speeds.

    `draws` is the seed of the fluctuations.
    """
    file = folder / "speeds.json"
    file.write_text(json.dumps(speeds))
    split = [round(SAMPLES_PER_SPEED * speed) for speed in speeds]
    asked = asked_for(
        folder,
        split,
        [{"type": "cpu"}] * len(speeds),
        steps,
        epoch_steps=EPOCH_STEPS,
        backend="torch",
        adaptive_split=adapts,
    )
    (Path(asked.source_folder) / "net.py").write_text(NET)
    config = {"file": str(file), "noise": noise, "sample_s": SAMPLE_S, "draws": draws}
    model = asked.job.model.model_copy(update={"config": config})
    return asked.model_copy(update={"job": asked.job.model_copy(update={"model": model})}), file


def changed(before: list[float], after: list[float]) -> list[tuple[list[float], list[str]]]:
    """For the speeds before and after: the share of the ideal in each window, and the changes.

    Leaves out the first WARM_UP_STEPS. A window with too few observed steps has the share NaN.
    """
    with tempfile.TemporaryDirectory() as folder:
        asked, file = made(Path(folder), before, BEFORE_STEPS + AFTER_STEPS, 0.0, adapts=True)
        done: list[int] = []

        def change(step: int) -> None:
            if step >= BEFORE_STEPS and not done:
                partial = file.with_suffix(".part")
                partial.write_text(json.dumps(after))
                partial.replace(file)
                done.append(step)

        seen, result = paced(asked, change)
    batch = asked.plan.global_batch_size
    found = []
    for speeds, first, last in ((before, WARM_UP_STEPS, done[0]), (after, done[0], NEVER)):
        events = [event for event in result.split_events if first < event.step <= last]
        shares = []
        for begins, ends in pairwise([first, *(event.step for event in events), last]):
            between = [one for one in seen if begins < one[0] <= ends]
            measured = len(between) > 2
            rate = (
                samples_per_s(between, batch, after=0, rows=EPOCH_STEPS * batch)
                if measured
                else float("nan")
            )
            shares.append(rate * SAMPLE_S / sum(speeds))
        found.append((shares, [f"step {event.step}: {event.batch_sizes}" for event in events]))
    return found


def wavering(
    speeds: list[float], noise: float, steps: int, *, adapts: bool, draws: int
) -> tuple[float, float]:
    """Samples per second, and changes of the split per 100 steps."""
    with tempfile.TemporaryDirectory() as folder:
        asked, _ = made(Path(folder), speeds, steps, noise, adapts=adapts, draws=draws)
        seen, result = paced(asked)
    batch = asked.plan.global_batch_size
    return samples_per_s(seen, batch, rows=EPOCH_STEPS * batch), 100 * len(
        result.split_events
    ) / result.steps


def shown(shares: list[float]) -> str:
    """The windows' shares on one line."""
    return " ".join(f"{share:.3f}" for share in shares)


def main() -> None:
    """Measure, and print a line for each case."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", action="append")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--noise", type=float, default=0.15)
    parser.add_argument("--steps", type=int, default=200, help="of each training with noise")
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the first round's noise; each further round adds 1",
    )
    parser.add_argument("--no-change", action="store_true")
    parser.add_argument("--no-noise", action="store_true")
    asked = parser.parse_args()
    for case in [] if asked.no_change else asked.case or ["2:1>1:1", "2:1>1:2", "4:2:1:1>1:2:4:1"]:
        before, after = ([float(one) for one in part.split(":")] for part in case.split(">"))
        for _ in range(asked.rounds):
            (at_first, early), (at_last, late) = changed(before, after)
            print(
                f"{case}: ends at {at_last[-1]:.3f} of the new ideal after {len(late)} change(s) "
                f"(bar 0.93 after at most 3); before at {at_first[-1]:.3f} after {len(early)}; "
                f"windows {shown(at_first)}, then {shown(at_last)}; "
                f"{'; '.join([*early, *late]) or 'no change'}",
                flush=True,
            )
    if not asked.no_noise:
        found: dict[str, list[tuple[float, float]]] = {"adaptive": [], "static": [], "again": []}
        for draws in range(asked.seed, asked.seed + asked.rounds):
            for way in random.sample(sorted(found), len(found)):
                found[way].append(
                    wavering(
                        [2.0, 1.0], asked.noise, asked.steps, adapts=way == "adaptive", draws=draws
                    )
                )
        rates = {way: [rate for rate, _ in ones] for way, ones in found.items()}
        of_round = zip(rates["adaptive"], rates["static"], rates["again"], strict=True)
        shares = [2 * adaptive / (static + again) for adaptive, static, again in of_round]
        floor = statistics.median(
            abs(a / b - 1) for a, b in zip(rates["static"], rates["again"], strict=True)
        )
        changes = middle([count for _, count in found["adaptive"]])
        print(
            f"times that fluctuate by {asked.noise:.0%}: {changes} changes in 100 steps (bar 1); "
            f"{middle(shares)} of the static split's throughput, noise floor {floor:.3f}"
        )


if __name__ == "__main__":
    main()
