"""Time to a target metric: an adaptive batch against five fixed batches, on three tasks.

    python tests/benchmarks/train/adaptive_batch.py [--seeds 3] [--rules]

The time is computed: two devices of different speeds take t_r(b) = a_r + s_r · b for b samples, and
a step takes as long as the slower one at the best split. Everything else is the product's code: the
update on the joint batch (in one process), the noise scale (from the two devices' unequal parts),
the decision to grow, and the learning-rate rule. Fixed batches get the smallest batch's rate,
scaled by the same rule. A training ends at the first step at which an exponential mean of the
held-out metric reaches the target. `--rules` compares the rules, which justifies `auto`.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lr_tasks import ADAMW, IMAGES, SGD, TABLE, LrTask, _rings, _save, _stripes
from one_process import OneProcess

from trainwright.estimator.curves import Affine
from trainwright.tasks.allocate.plan.split import split_batch
from trainwright.tasks.train.batch.adaptive_batch import BatchGrowth, Rule, rule_for
from trainwright.tasks.train.batch.half_batches import half_squares
from trainwright.tasks.train.batch.noise_scale import noise_and_signal
from trainwright.tasks.train.batch.sampling import epoch_order
from trainwright.tasks.train.rank.rank import Rank

SWEEP = (16, 32, 64, 128, 256)
WINDOW_STEPS = 20
CHECK_SAMPLES = 400
DEVICES = (Affine(fixed=8e-3, per_sample=1e-4), Affine(fixed=8e-3, per_sample=2e-4))
"""8 ms per step plus 0.1 and 0.2 ms per sample: at 120 samples, half of a step is fixed cost."""


@dataclass(frozen=True)
class Case:
    """A task, the learning rate of its smallest batch, and its target in points."""

    task: LrTask
    learning_rate: float
    target: float


RINGS = {"kind": "mlp", "inputs": 12, "classes": 4}
STRIPES = {"kind": "cnn", "width": 8, "classes": 6}
CASES = (
    Case(
        LrTask("digits MLP, AdamW", None, {"kind": "mlp"}, ADAMW, 60, SWEEP[0], IMAGES), 1e-3, 94.0
    ),
    Case(LrTask("rings MLP, SGD", _save(_rings, 9), RINGS, SGD, 200, SWEEP[0], TABLE), 0.1, 80.0),
    Case(
        LrTask("stripes CNN, AdamW", _save(_stripes, 9), STRIPES, ADAMW, 60, SWEEP[0], IMAGES),
        1e-3,
        84.0,
    ),
)


@functools.cache
def split_of(batch: int) -> tuple[int, ...]:
    """The best split over the devices."""
    split = split_batch(batch, DEVICES)
    assert split is not None
    return tuple(split)


def step_time_s(batch: int) -> float:
    """The slower device's time at the best split."""
    return max(device(part) for device, part in zip(DEVICES, split_of(batch), strict=True))


def _loss(rank: Rank, rows: Any) -> torch.Tensor:
    inputs, targets = rank._batch(rows)
    return rank._loss(rank.model(inputs), targets)


def seconds_to_target(
    case: Case, one: OneProcess, seed: int, rule: Rule, fixed: int | None
) -> tuple[float, list[tuple[int, int]]]:
    """Computed time to the target (inf if not reached), and the batches by step.

    `fixed` is the batch; None lets it grow.
    """
    rank = one.rank(seed)
    rule = rule_for(rule, case.task.optimizer["name"])
    base = SWEEP[0]
    rank.split = [fixed or base]
    growth = BatchGrowth(base, SWEEP[-1], rule, batch=fixed or base)
    rows, clock, samples, step, checked, mean = len(rank.train_rows), 0.0, 0, 0, 0, 0.0
    sizes = [(0, rank.split[0])]
    checks, times = 0, dict[int, float]()
    while samples < rows * case.task.epochs:
        epoch, begin = divmod(samples, rows)
        if begin == 0:
            order = epoch_order(rank.train_rows, seed, epoch)
        size = rank.split[0]
        noise = rank.noise_scale.value
        found = rank.step(order, begin, step)
        if found.samples == size:
            parts = split_of(size)
            squares = half_squares(
                rank.model, partial(_loss, rank), order[begin : begin + size], parts[0]
            )
            rank.noise_scale.add(*noise_and_signal(*squares))
        rank.update(case.learning_rate * growth.factor(step, noise))
        if size not in times:
            times[size] = step_time_s(size)
        clock += times[size]
        samples += found.samples
        step += 1
        if fixed is None and step % WINDOW_STEPS == 0:
            better = growth.observe(times[size], noise)
            if better is not None:
                growth.change(better[0], step, noise)
                rank.split = [better[0]]
                sizes.append((step, better[0]))
        if samples >= checked + CHECK_SAMPLES:
            checked = samples
            checks += 1
            mean = 0.7 * mean + 0.3 * one._points(rank)
            if mean / (1 - 0.7**checks) >= case.target:
                return clock, sizes
    return math.inf, sizes


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rules", action="store_true", help="compare the learning-rate rules")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rules: tuple[Rule, ...] = (
        ("constant", "sqrt", "linear", "adascale") if asked.rules else ("auto",)
    )
    for case in CASES:
        one = OneProcess(case.task)
        for rule in rules:
            used = rule_for(rule, case.task.optimizer["name"])
            print(f"{case.task.name}, target {case.target:g}, rule {used}")
            fixed = {
                size: [
                    seconds_to_target(case, one, seed, rule, size)[0] for seed in range(asked.seeds)
                ]
                for size in SWEEP
            }
            for size, seconds in fixed.items():
                print(f"  fixed {size:4}: {_shown(seconds)}", flush=True)
            runs = [seconds_to_target(case, one, seed, rule, None) for seed in range(asked.seeds)]
            grown = [seconds for seconds, _ in runs]
            best = min(statistics.mean(seconds) for seconds in fixed.values())
            ratio = statistics.mean(grown) / best if math.isfinite(best) else math.inf
            sizes = " -> ".join(str(size) for _, size in runs[0][1])
            print(f"  adaptive:   {_shown(grown)}   {sizes}")
            verdict = "within" if ratio <= 1.1 else "NOT within"
            print(f"  ratio to the best fixed batch {ratio:.2f}, {verdict} 1.1", flush=True)


def _shown(seconds: list[float]) -> str:
    spread = (max(seconds) - min(seconds)) / 2
    return (
        f"{statistics.mean(seconds):7.2f} ± {spread:.2f} s"
        if math.isfinite(sum(seconds))
        else "not always reached"
    )


if __name__ == "__main__":
    main()
