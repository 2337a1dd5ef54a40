"""How good recommendations are: each set of the benchmark predicted from the others.

    python tests/benchmarks/recommend/leave_one_out.py [FILE]

Regret: how much worse the metric of the first choice is than that of the best model on the set, in
percent of the metric; beside it, that of always taking one and the same model. Coverage: the share
of measured metrics within the 80 % intervals.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from pathlib import Path

from measure_templates import SHIPPED

from trainwright.tasks.recommend.similar_sets.benchmark_table import Trained, read_rows
from trainwright.tasks.recommend.similar_sets.data_figures import metric_of
from trainwright.tasks.recommend.similar_sets.metric_prediction import predict_metric


def main() -> int:
    """Print regret and coverage for each task."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, nargs="?", default=SHIPPED)
    table = read_rows(parser.parse_args().file.read_text().splitlines())
    for task in sorted({one.task for one in table}):
        report(task, [one for one in table if one.task == task])
    return 0


def report(task: str, table: list[Trained]) -> None:
    """One task."""
    cases: dict[tuple[str, float, int], list[Trained]] = defaultdict(list)
    for one in table:
        cases[one.data, one.fraction, one.seed].append(one)
    models = sorted({one.model for one in table})
    chosen, same, inside = [], {model: [] for model in models}, []
    for (name, _, _), rows in cases.items():
        others = [one for one in table if one.data != name]
        errors = {}
        for one in rows:
            found = predict_metric(one.figures, task, one.model, others)
            if found is not None:
                errors[one.model] = found.error.median
                inside.append(found.error.low <= one.error <= found.error.high)
        if not errors:
            continue
        best = min(one.error for one in rows)
        by_model = {one.model: one for one in rows}
        chosen.append(regret(task, by_model[min(errors, key=lambda model: errors[model])], best))
        for model in models:
            if model in by_model:
                same[model].append(regret(task, by_model[model], best))
    if not chosen:
        print(f"{task}: too few sets")
        return
    print(f"{task}: {len({one.data for one in table})} sets, {len(cases)} cases")
    print(
        f"  regret of the first choice {statistics.mean(chosen):.2f} %, worst {max(chosen):.1f} %"
    )
    for model, values in sorted(same.items(), key=lambda pair: statistics.mean(pair[1])):
        print(f"  always {'-'.join(model)}: {statistics.mean(values):.2f} %, n = {len(values)}")
    print(f"  80 % intervals hold {100 * statistics.mean(inside):.0f} % of {len(inside)}")


def regret(task: str, one: Trained, best: float) -> float:
    """In percent of the metric."""
    if metric_of(task) == "accuracy":
        return 100 * (one.error - best) / (1 - best)
    return 100 * (one.error - best) / best


if __name__ == "__main__":
    raise SystemExit(main())
