"""Wall time to a target with real ranks: an adaptive batch against five fixed batches.

    python tests/benchmarks/train/time_to_target.py [--task digits|rings|stripes] [--rounds 5]
        [--seed 0] [--learning-rate LR]

The tasks are those of `adaptive_batch.py` (digits and stripes with AdamW, a table with SGD). Two
emulated devices take 0.1 and 0.2 ms per sample; the other costs of a step are the real ones of
processes, sums and recording. (`adaptive_batch.py` computes device times by a formula, in one
process.) A fixed batch gets the smallest batch's learning rate, scaled by the square root of the
batch (AdamW) or linearly (SGD).

The time runs from the first step until the exponential mean of held-out accuracies (weight 0.5)
reaches the task's target, interpolated linearly between the ends of two epochs. It includes
validation, as for a user, but not the start of the processes. A lower `--learning-rate` makes
trainings longer.

Each round runs all batches in random order, with one seed, and the adaptive batch twice; the
difference of its two times is the noise. Printed: each batch's seconds, and the ratio of the
adaptive batch's time to the best fixed batch's (the one with the lowest median): median, minimum
and maximum over the rounds. The bar is 1.1.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.extend(
    str(Path(__file__).parents[2] / "tasks" / "train" / room) for room in ("", "hosts", "rank")
)

from adaptive_batch import CASES, SWEEP, Case
from lr_tasks import ADAMW
from one_process import MODELS
from pace import NEVER, middle
from training_case import NO_SPARE, request

from trainwright.tasks import progress
from trainwright.tasks.data import dataset
from trainwright.tasks.errors import Interrupted
from trainwright.tasks.train import train
from trainwright.tasks.train.batch.adaptive_batch import rate_factor

TASKS = dict(zip(("digits", "rings", "stripes"), CASES, strict=True))
SPEEDS = (10.0, 5.0)
WEIGHT, MOST_EPOCHS = 0.5, 1000
VALIDATED = 0.4
"""The share of rows for validation: makes epochs short and their accuracies steady."""
GROWS = ("grows", "again")
BAR = 1.1


class Watch:
    """Follows a training's epochs, and sets `stop` once the target is reached."""

    def __init__(self, target: float) -> None:
        self._target = target
        self.stop, self.seconds, self.batches = threading.Event(), math.inf, list[int]()
        self._began: float | None = None
        self._mean = self._weights = 0.0
        self._before = (0.0, 0.0)

    def hear(self, event: dict[str, Any]) -> None:
        if event["event"] == "train":
            self._began = self._began or time.perf_counter()
            if (size := sum(event["batch_sizes"])) not in self.batches:
                self.batches.append(size)
        if event["event"] != "epoch" or self._began is None or self.stop.is_set():
            return
        now = time.perf_counter() - self._began
        self._mean = WEIGHT * self._mean + event["accuracy"]
        self._weights = WEIGHT * self._weights + 1
        then, before = self._before
        self._before = now, (reached := self._mean / self._weights)
        if reached >= self._target:
            self.seconds = then + (now - then) * (self._target - before) / (reached - before)
            self.stop.set()


def taken(case: Case, fixed: int | None, seed: int, learning_rate: float) -> Watch:
    """Train until the target is reached.

    `fixed` is the batch; None lets it grow from the smallest one. `learning_rate` is that of the
    smallest batch.
    """
    batch, (fast, slow) = fixed or SWEEP[0], SPEEDS
    own = round(batch * fast / (fast + slow))
    grows: dict[str, Any] = (
        {} if fixed else {"adaptive_batch": True, "batch_bounds": [SWEEP[0], SWEEP[-1]]}
    )
    task, watch = case.task, Watch(case.target / 100)
    with tempfile.TemporaryDirectory() as folder:
        asked = request(
            Path(folder),
            [own, batch - own],
            devices=[{"type": "emulated", "speed": speed} for speed in SPEEDS],
            model=task.model,
            validation_fraction=VALIDATED,
            epochs=MOST_EPOCHS,
            optimizer=task.optimizer,
            seed=seed,
            checkpoint={"every_steps": NEVER, "keep_last": 1, "keep_best": False},
            **grows,
            **NO_SPARE,
        )
        rate = learning_rate * rate_factor(
            "sqrt" if task.optimizer == ADAMW else "linear", batch, SWEEP[0], None
        )
        asked = asked.model_copy(
            update={"learning_rate": rate, "source_folder": str(MODELS), "entry": "small.py"}
        )
        if task.data is not None:
            task.data(path := Path(folder) / "data.npz")
            rows = asked.job.data.model_copy(
                update={"uri": str(path), "target": "label", "task": task.task}
            )
            job = asked.job.model_copy(update={"data": rows})
            asked = asked.model_copy(update={"job": job, "schema_": dataset.describe(rows)})
        # Interrupted: the watch stops the training at the target.
        with progress.listening(watch.hear), contextlib.suppress(Interrupted):
            train(asked, stop=watch.stop)
    return watch


def main() -> None:
    """Measure, and print a line for each batch and the verdict."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", choices=list(TASKS), default="digits")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first round; each further round adds 1"
    )
    parser.add_argument(
        "--learning-rate", type=float, help="of the smallest batch (default: the task's)"
    )
    asked = parser.parse_args()
    case = TASKS[asked.task]
    ways: dict[str, int | None] = {
        **{f"fixed {size}": size for size in SWEEP},
        **dict.fromkeys(GROWS),
    }
    found: dict[str, list[float]] = {way: [] for way in ways}
    for seed in range(asked.seed, asked.seed + asked.rounds):
        for way in random.sample(sorted(ways), len(ways)):
            watch = taken(case, ways[way], seed, asked.learning_rate or case.learning_rate)
            found[way].append(watch.seconds)
            print(f"seed {seed}, {way}: {watch.seconds:.2f} s, batches {watch.batches}", flush=True)
    for way, seconds in found.items():
        print(f"{way:10} {middle(seconds)} s to {case.target:g} %")
    best = min(
        (way for way in ways if way not in GROWS), key=lambda way: statistics.median(found[way])
    )
    pairs = list(zip(*(found[way] for way in GROWS), strict=True))
    ratios = [statistics.mean(pair) / fixed for pair, fixed in zip(pairs, found[best], strict=True)]
    floor = statistics.median(abs(one / other - 1) for one, other in pairs)
    met = "met" if statistics.median(ratios) <= BAR else "missed"
    print(
        f"the adaptive batch takes {middle(ratios)} of the time of {best} (bar {BAR}: {met}), "
        f"noise {floor:.3f}"
    )


if __name__ == "__main__":
    main()
