"""Predicted against allocated memory: `python tests/benchmarks/estimator/memory.py [--cases N] …`.

For models that calibration does not measure: the predicted peak of live bytes against that of
torch's CPU allocator, from the profiler's events. There are predictions from a trace at the same
batch size and at another one; without the workspace of operations (lifetimes of tensors only); and
by torch's MemTracker in a real step.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections import defaultdict
from pathlib import Path

import allocator
import mem_tracker
import safe
import torch
from accuracy import HEADER, percent, row, summarise, table
from zoo import Case, cases

from trainwright.estimator.memory.step_memory import peak_bytes
from trainwright.estimator.trace.trace import trace

METHODS = ("predicted", "from another batch size", "lifetimes only", "MemTracker")
ELSEWHERE = 4
"""The other batch size; its double if the case already has this one."""


def measure(case: Case) -> tuple[float, dict[str, float]]:
    """Bytes of the allocator's peak, and of each prediction."""
    elsewhere = ELSEWHERE if case.batch_size != ELSEWHERE else 2 * ELSEWHERE
    here = trace(case.spec(), case.batch_size)
    predicted = {
        "predicted": peak_bytes(here, case.batch_size),
        "from another batch size": peak_bytes(trace(case.spec(), elsewhere), case.batch_size),
        "lifetimes only": here.peak_memory_bytes(case.batch_size),
        "MemTracker": mem_tracker.peak_bytes(case),
    }
    gc.collect()
    return allocator.peak_bytes(case), predicted


def main() -> None:
    """Measure, compare, print two tables: methods, then families."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=72)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--safe",
        type=int,
        default=24,
        help="cases of the safe bound, one process each; 300 take half an hour",
    )
    parser.add_argument("--out", type=Path, help="the cases as JSON")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    seen: list[tuple[Case, float, dict[str, float]]] = []
    for case in cases(given.seed, given.cases):
        peak, predicted = measure(case)
        seen.append((case, peak, predicted))
        off = "  ".join(
            f"{name} {percent(value / peak - 1, signed=True)}" for name, value in predicted.items()
        )
        print(f"{case.label:58} {peak / 2**20:8.2f} MiB  {off}", flush=True)
    measured = [peak for _, peak, _ in seen]
    rows = [HEADER]
    rows += [
        row(name, summarise([each[name] for _, _, each in seen], measured)) for name in METHODS
    ]
    print("\n" + table(rows))
    families: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for case, peak, predicted in seen:
        families[case.family].append((predicted["predicted"], peak))
    ordered = sorted(
        families.items(), key=lambda one: max(abs(guess / peak - 1) for guess, peak in one[1])
    )
    rows = [("family (predicted)", *HEADER[1:])]
    rows += [
        row(name, summarise([guess for guess, _ in pairs], [peak for _, peak in pairs]))
        for name, pairs in ordered
    ]
    print("\n" + table(rows))
    if given.safe:
        print("\nresident memory: case, expected, safe, measured")
        print("\n" + safe.report(safe.compare(given.safe, given.seed, safe.MOST_BYTES)))
    if given.out:
        document = [
            {"case": case.label, "family": case.family, "peak_bytes": peak, **each}
            for case, peak, each in seen
        ]
        given.out.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
