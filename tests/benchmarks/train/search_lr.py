"""`search_lr` against a grid of 12 rates and the steepest-descent rule, on five held-out tasks.

    python tests/benchmarks/train/search_lr.py [--developed-on] [--minutes 4] [--renew]

All trainings run in one process with the product's own update code. The grid's results are stored
in lr_grid.json, with the product version and the settings. The benchmark reuses them if both are
the same as now; pass `--renew` after a change of the training code. After `--minutes` it stops, and
continues the grid next time.

A rate is within the bar if its metric is at most 0.5 points, or one standard error of the grid's
best, below that best. For comparison, the grid's best rate is trained again with three other seeds:
it was chosen as the best of twelve, so its own metric is biased upwards. `--developed-on` shows the
tasks on which the rule was developed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from importlib.metadata import version
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
GRID = Path(__file__).with_name("lr_grid.json")


def made_with() -> dict[str, Any]:
    """Version and settings of a grid, stored beside its points."""
    tasks = {
        task.name: {
            "model": task.model,
            "optimizer": task.optimizer,
            "epochs": task.epochs,
            "batch": task.batch,
        }
        for task in (*HELD_OUT, *DEVELOPED_ON)
    }
    ladders = {name: list(ends) for name, ends in LADDERS.items()}
    return {"trainwright": version("trainwright"), "ladders": ladders, "tasks": tasks}


class Grid:
    """Final metrics by task, rate and seed, stored in a file."""

    def __init__(self, until: float, *, renew: bool) -> None:
        self.until = until
        kept = json.loads(GRID.read_text()) if GRID.exists() and not renew else {}
        self.points: dict[str, dict[str, float]] = (
            kept["points"] if kept.get("made_with") == made_with() else {}
        )

    def fill(self, task: LrTask, one: OneProcess) -> list[tuple[float, list[float]]]:
        """A task's metrics by rate; trains the missing ones. Raises TimeoutError."""
        known = self.points.setdefault(task.name, {})
        rows = []
        for rate in ladder(*LADDERS[task.optimizer["name"]], GRID_POINTS):
            for seed in SEEDS:
                key = f"{rate:.6g} {seed}"
                if key not in known:
                    if time.monotonic() > self.until:
                        raise TimeoutError
                    known[key] = round(one.trained(rate, seed)[0], 4)
                    content = {"made_with": made_with(), "points": self.points}
                    GRID.write_text(json.dumps(content, indent=1) + "\n")
            rows.append((rate, [known[f"{rate:.6g} {seed}"] for seed in SEEDS]))
        return rows


def steepest(points: list[dict[str, Any]]) -> float:
    """The usual finder's choice: the rate with the steepest fall of the loss over log(rate)."""
    loss = smooth([one["loss"] for one in points if math.isfinite(one["loss"])])
    slopes = [after - before for before, after in zip(loss[:-2], loss[2:], strict=True)]
    return float(points[1 + min(range(len(slopes)), key=slopes.__getitem__)]["learning_rate"])


def row_of(
    task: LrTask, one: OneProcess, grid: list[tuple[float, list[float]]]
) -> tuple[bool, bool]:
    """Print a task's row; returns whether the search, and the retrained grid's best, are within."""
    rate, best = max(grid, key=lambda point: statistics.mean(point[1]))
    error = statistics.stdev(best) / math.sqrt(len(best))
    allowed = max(0.5, error)
    ours: list[tuple[float, float]] = []
    usual: list[tuple[float, float]] = []
    steps = 0
    for seed in SEEDS:
        answer = one.searched(
            seed, ladder(*LADDERS[task.optimizer["name"]], STEPS), trial_steps(one.steps)
        )
        found = Searched.model_validate({**answer, "states": [answer["state"]]})
        points = [(point.learning_rate, point.loss, point.accuracy) for point in found.points]
        chosen = with_trials(choose(points), found.trials).learning_rate
        steps += len(points) + sum(trial.steps for trial in found.trials)
        ours.append((chosen, one.trained(chosen, seed)[0]))
        other = steepest(answer["points"])
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
        f"{task.name:22} {statistics.mean(best):6.2f} ± {error:4.2f} at {rate:<8.2g} "
        f"{again:6.2f} {verdicts[0]:4} {mean:6.2f} {verdicts[1]:4} {100 * cost:4.1f} %  "
        f"{usual_mean:6.2f} {verdicts[2]:4}"
        f" | {', '.join(f'{value:.2g}' for value, _ in ours)}"
        f" | {', '.join(f'{value:.2g}' for value, _ in usual)}",
        flush=True,
    )
    return within, again_near


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--developed-on", action="store_true")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="stop after this time; keeps the grid"
    )
    parser.add_argument("--renew", action="store_true", help="discard the stored grid")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    grid = Grid(time.monotonic() + 60 * asked.minutes, renew=asked.renew)
    tasks = [
        (task, OneProcess(task)) for task in (DEVELOPED_ON if asked.developed_on else HELD_OUT)
    ]
    try:
        rows = [grid.fill(task, one) for task, one in tasks]
    except TimeoutError:
        print("out of time; the next call continues the grid")
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
