"""How good recommendations are: each set of the benchmark predicted from the others.

    python tests/benchmarks/recommend/leave_one_out.py [FILE]

Regret: how much worse the metric of the first choice is than that of the best model on the set, in
percent of the metric, both as means over seeds. The first choice is the model with the least
predicted error, before any comparison on rows. Beside it, the regret of always taking one and the
same model, and that of the first choice on the same cases, as not every model was trained on every
set. Coverage: the share of measured metrics within the 80 % intervals. Their mean width is in
shares of rows, or in units of the best constant's error.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from measure_templates import SHIPPED

from trainwright.tasks.recommend.similar_sets.benchmark_table import Trained, read_rows
from trainwright.tasks.recommend.similar_sets.data_figures import metric_of
from trainwright.tasks.recommend.similar_sets.metric_prediction import predict_metric

BEST = "the least predicted error"


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
    regrets: list[dict[str, float]] = []
    """by case: of each model, and of the first choice"""
    inside, widths = [], []
    classes = metric_of(task) == "accuracy"
    for (name, _), rows in cases.items():
        others = [one for one in table if one.data != name]
        errors, predicted = {}, {}
        for model, measured in rows.items():
            found = predict_metric(measured[0].figures, task, model, others)
            if found is not None:
                errors[model] = statistics.mean(one.error for one in measured)
                predicted[model] = found.error.median
                unit = 1 if classes else measured[0].figures["constant_error"]
                widths.append((found.error.high - found.error.low) / unit)
                inside += [found.error.low <= one.error <= found.error.high for one in measured]
        if len(errors) < 2:
            continue
        least = min(errors.values())
        case = {_name(one): regret(task, error, least) for one, error in errors.items()}
        case[BEST] = case[_name(min(predicted, key=lambda model: predicted[model]))]
        regrets.append(case)
    if not regrets:
        print(f"{task}: too few sets")
        return
    print(f"{task}: {len({one.data for one in table})} sets, {len(cases)} cases")
    values = [one[BEST] for one in regrets]
    print(f"  regret of {BEST}: {statistics.mean(values):.2f} %, worst {max(values):.1f} %")
    models = {name for one in regrets for name in one} - {BEST}
    for same in sorted(models, key=lambda name: mean_of(regrets, name, name)):
        count = sum(same in one for one in regrets)
        print(
            f"  always {same}: {mean_of(regrets, same, same):.2f} %, n = {count}; there the "
            f"first choice {mean_of(regrets, BEST, same):.2f} %"
        )
    hold, width = 100 * statistics.mean(inside), statistics.mean(widths)
    print(f"  80 % intervals hold {hold:.0f} % of {len(inside)}; mean width {width:.3f}")


def mean_of(regrets: list[dict[str, float]], choice: str, model: str) -> float:
    """The mean regret of a choice, over the cases on which a model was trained."""
    return statistics.mean(one[choice] for one in regrets if model in one)


def _name(model: tuple[str, str]) -> str:
    return "-".join(model)


def regret(task: str, error: float, best: float) -> float:
    """In percent of the metric."""
    if metric_of(task) == "accuracy":
        return 100 * (error - best) / (1 - best)
    return 100 * (error - best) / best


if __name__ == "__main__":
    raise SystemExit(main())
