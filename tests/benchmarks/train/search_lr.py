"""`search_lr` against a grid of 12 rates and the usual rule (steepest descent), on five tasks that its rule was not made on.

    python tests/benchmarks/train/search_lr.py [--developed-on] [--minutes 4]

The grid is kept in lr_grid.json with the hash of the code that made it, and made anew where that differs; it goes on where it was
after `--minutes`. Trains in one process, on the product's own update code. "Within" is: at most 0.5 points or one standard error
of the grid's best below it. The noise stands beside it: the grid's own best rate, trained again with three other seeds (it was
the best of twelve with those that it was found by, so that it is told too good). `--developed-on` shows the tasks on which the
rule was developed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from lr_tasks import DEVELOPED_ON, HELD_OUT, LrTask
from one_process import OneProcess

from trainwright.tasks.search_lr.learning_rate import (
    LADDERS,
    STEPS,
    choose,
    ladder,
    with_trials,
)
from trainwright.tasks.train.request import Searched
from trainwright.tasks.train.worker.lr_curve import smooth
from trainwright.tasks.train.worker.lr_trials import trial_steps

SEEDS, OTHER_SEEDS = (0, 1, 2), (3, 4, 5)
GRID_POINTS = 12
HERE = Path(__file__).parent
GRID = HERE / "lr_grid.json"
_MADE_BY = (
    "tasks/data/dataset.py",
    "tasks/train/rank/replica.py",
    "tasks/train/rank/rank.py",
    "tasks/train/rank/gradients.py",
    "tasks/train/batch/sampling.py",
    "tasks/train/rank/optimizer.py",
    "tests/benchmarks/train/lr_tasks.py",
    "tests/benchmarks/train/one_process.py",
    "tests/benchmarks/train/models/small.py",
)


def made_by() -> str:
    """The hash of the modules that a grid result depends on."""
    whole = hashlib.sha256()
    for name in _MADE_BY:
        whole.update((HERE.parents[2] / name).read_bytes())
    return whole.hexdigest()


class Grid:
    """Final metrics by task, rate and seed, kept in a file."""

    def __init__(self, until: float) -> None:
        self.until = until
        kept = json.loads(GRID.read_text()) if GRID.exists() else {}
        self.points: dict[str, dict[str, float]] = (
            kept["points"] if kept.get("made_by") == made_by() else {}
        )

    def fill(self, task: LrTask, one: OneProcess) -> list[tuple[float, list[float]]]:
        """A task's metrics by rate; trains what is missing. Raises TimeoutError."""
        known = self.points.setdefault(task.name, {})
        rows = []
        for rate in ladder(*LADDERS[task.optimizer["name"]], GRID_POINTS):
            for seed in SEEDS:
                key = f"{rate:.6g} {seed}"
                if key not in known:
                    if time.monotonic() > self.until:
                        raise TimeoutError
                    known[key] = round(one.trained(rate, seed)[0], 4)
                    GRID.write_text(
                        json.dumps({"made_by": made_by(), "points": self.points}, indent=1) + "\n"
                    )
            rows.append((rate, [known[f"{rate:.6g} {seed}"] for seed in SEEDS]))
        return rows


def steepest(points: list[dict[str, Any]]) -> float:
    """The usual finder's choice: where the smoothed loss falls fastest over log(rate)."""
    loss = smooth([one["loss"] for one in points if math.isfinite(one["loss"])])
    slopes = [after - before for before, after in zip(loss[:-2], loss[2:], strict=True)]
    return float(points[1 + min(range(len(slopes)), key=slopes.__getitem__)]["learning_rate"])


def row_of(
    task: LrTask, one: OneProcess, grid: list[tuple[float, list[float]]]
) -> tuple[bool, bool]:
    """Print a task's row; whether the search is within the bar, and whether the grid's best again is."""
    rate, best = max(grid, key=lambda point: statistics.mean(point[1]))
    error = statistics.stdev(best) / math.sqrt(len(best))
    allowed = max(0.5, error)
    ours: list[tuple[float, float]] = []
    usual: list[tuple[float, float]] = []
    steps = 0
    for seed in SEEDS:
        said = one.searched(
            seed, ladder(*LADDERS[task.optimizer["name"]], STEPS), trial_steps(one.steps)
        )
        found = Searched.model_validate({**said, "states": [said["state"]]})
        points = [(point.learning_rate, point.loss, point.accuracy) for point in found.points]
        chosen = with_trials(choose(points), found.trials).learning_rate
        steps += len(points) + sum(trial.steps for trial in found.trials)
        ours.append((chosen, one.trained(chosen, seed)[0]))
        other = steepest(said["points"])
        usual.append((other, one.trained(other, seed)[0]))
    cost = steps / (len(SEEDS) * GRID_POINTS * one.steps)
    mean, usual_mean = (
        statistics.mean(points for _, points in ours),
        statistics.mean(points for _, points in usual),
    )
    again = statistics.mean(one.trained(rate, seed)[0] for seed in OTHER_SEEDS)
    near, again_near, usual_near = (
        value >= statistics.mean(best) - allowed for value in (mean, again, usual_mean)
    )
    within = near and cost <= 0.15
    verdicts = ["yes" if near else "NO" for near in (again_near, within, usual_near)]
    print(
        f"{task.name:22} {statistics.mean(best):6.2f} ± {error:4.2f} at {rate:<8.2g} {again:6.2f} {verdicts[0]:4}"
        f" {mean:6.2f} {verdicts[1]:4} {100 * cost:4.1f} %  {usual_mean:6.2f} {verdicts[2]:4}"
        f" | {', '.join(f'{value:.2g}' for value, _ in ours)} | {', '.join(f'{value:.2g}' for value, _ in usual)}",
        flush=True,
    )
    return within, again_near


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--developed-on", action="store_true")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="then stop; the grid is kept"
    )
    asked = parser.parse_args()
    torch.set_num_threads(1)
    grid = Grid(time.monotonic() + 60 * asked.minutes)
    tasks = [
        (task, OneProcess(task)) for task in (DEVELOPED_ON if asked.developed_on else HELD_OUT)
    ]
    try:
        rows = [grid.fill(task, one) for task, one in tasks]
    except TimeoutError:
        print("out of time; the grid goes on from here next time")
        return
    print("points: accuracy, or R², in percent; mean of 3 seeds")
    heads = f"{'again':6} {'in':4} {'search':6} {'in':4} {'cost':7} {'steepest':6} {'in':2} | rates"
    print(f"{'task':22} {'best of the grid':26} {heads}")
    within = [row_of(task, one, row) for (task, one), row in zip(tasks, rows, strict=True)]
    ours, again = (sum(column) for column in zip(*within, strict=True))
    print(
        f"{ours} of {len(within)} tasks within the bar; the grid's best with other seeds: {again}"
    )


if __name__ == "__main__":
    main()
