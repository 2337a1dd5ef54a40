"""A first run's predicted figures against what it measures: `… first_run.py [--repeats N] [JOB]`.

Each repeat runs the job in a fresh home, so that nothing is known of the machine but what the run
itself calibrates. Printed: each predicted figure with its 90 % interval (of memory: at most) and
the measured one; then in how many repeats all were inside. Bar: 9 of 10, on a quiet machine.
Beside it stand the noise, which is the spread of each measured figure, (highest - lowest) / median,
and the width of the intervals.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from trainwright.tasks.analyze.prediction_check import predicted_and_measured
from trainwright.tasks.runs.artefacts.estimate import Estimate
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.runs.artefacts.training_result import Result
from trainwright.tasks.runs.run import list_runs
from trainwright.tasks.settings import Settings

_DIGITS = Path(__file__).parents[2] / "dags" / "jobs" / "digits.yaml"


def first_run(job: Path) -> list[dict[str, Any]]:
    """Train the job in a fresh home: its predicted and measured figures."""
    with tempfile.TemporaryDirectory(prefix="trainwright-first-") as name:
        home = {"TRAINWRIGHT_HOME": f"{name}/home", "TRAINWRIGHT_STORE": f"file://{name}/store"}
        environment = os.environ | home
        command = [sys.executable, "-m", "trainwright.tasks.cli.main", "train", str(job)]
        subprocess.run(
            command, env=environment, check=True, stdin=subprocess.DEVNULL, capture_output=True
        )
        settings = Settings.from_environment(environment)
        run = next(iter(list_runs(settings.store, settings)))
        return predicted_and_measured(run.read(Result), run.find(Estimate), run.find(Plan))


def main() -> int:
    """Run the repeats and print; exit code 1 if the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("job", type=Path, nargs="?", default=_DIGITS)
    parser.add_argument("--repeats", type=int, default=10)
    given = parser.parse_args()
    all_inside = 0
    seen, widths = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for number in range(given.repeats):
        rows = first_run(given.job)
        print(f"run {number + 1}")
        for row in rows:
            if row["measured"] is not None:
                seen[row["quantity"]].append(row["measured"])
            print(
                f"  {row['quantity']:32} {row['predicted']:12.4g} {row['unit']:5} "
                f"({row['low']:.4g} to {row['high']:.4g})  measured "
                f"{'-' if row['measured'] is None else format(row['measured'], '.4g'):>10}  "
                f"{ {True: 'inside', False: 'OUTSIDE', None: ''}[row['inside']] }",
                flush=True,
            )
        bounded = [row for row in rows if row["low"] < row["high"]]
        all_inside += all(row["inside"] is True for row in bounded)
        for row in bounded:
            if row["unit"] != "B":  # memory has no lower bound
                widths[row["quantity"].partition(",")[0]].append(row["high"] / row["low"])
    for quantity, values in seen.items():
        middle = statistics.median(values)
        spread = (max(values) - min(values)) / middle if middle else 0.0
        print(f"{quantity:34} median {middle:.4g}, spread {100 * spread:.0f} %")
    for quantity, ratios in widths.items():
        print(f"{quantity:34} interval: high / low {statistics.median(ratios):.2g}")
    print(f"all figures inside: {all_inside} of {given.repeats}; bar: 9 of 10")
    return 0 if all_inside >= 0.9 * given.repeats else 1


if __name__ == "__main__":
    sys.exit(main())
