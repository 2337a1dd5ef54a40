"""How good recommendations are: each set of the benchmark predicted from the others.

    python tests/benchmarks/recommend/leave_one_out.py [FILE]

Regret: how much worse the metric of the first choice is than that of the best model on the set, in
percent of the metric, both as means over seeds; beside it, that of always taking one and the same
model. Coverage: the share of measured metrics within the 80 % intervals.
"""

from __future__ import annotations

import argparse
import statistics
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
    cases: dict[tuple[str, float], dict[tuple[str, str], list[Trained]]] = {}
    for one in table:
        cases.setdefault((one.data, one.fraction), {}).setdefault(one.model, []).append(one)
    models = sorted({one.model for one in table})
    chosen, same, inside = [], {model: [] for model in models}, []
    for (name, _), rows in cases.items():
        others = [one for one in table if one.data != name]
        errors, predicted = {}, {}
        for model, measured in rows.items():
            found = predict_metric(measured[0].figures, task, model, others)
            if found is not None:
                errors[model] = statistics.mean(one.error for one in measured)
                predicted[model] = found.error.median
                inside += [found.error.low <= one.error <= found.error.high for one in measured]
        if len(errors) < 2:
            continue
        best = min(errors.values())
        first = min(predicted, key=lambda model: predicted[model])
        chosen.append(regret(task, errors[first], best))
        for model, error in errors.items():
            same[model].append(regret(task, error, best))
    if not chosen:
        print(f"{task}: too few sets")
        return
    print(f"{task}: {len({one.data for one in table})} sets, {len(cases)} cases")
    print(
        f"  regret of the first choice {statistics.mean(chosen):.2f} %, worst {max(chosen):.1f} %"
    )
    tried = {model: values for model, values in same.items() if values}
    for model, values in sorted(tried.items(), key=lambda pair: statistics.mean(pair[1])):
        print(f"  always {'-'.join(model)}: {statistics.mean(values):.2f} %, n = {len(values)}")
    print(f"  80 % intervals hold {100 * statistics.mean(inside):.0f} % of {len(inside)}")


def regret(task: str, error: float, best: float) -> float:
    """In percent of the metric."""
    if metric_of(task) == "accuracy":
        return 100 * (error - best) / (1 - best)
    return 100 * (error - best) / best


if __name__ == "__main__":
    raise SystemExit(main())
