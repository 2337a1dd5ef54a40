"""The time to parse the DAG files beyond Airflow's own import.

    python tests/benchmarks/dag_parse.py

Each round is a new process that imports Airflow's SDK, then the DAG files. The noise floor is the
repeated import, which does nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

ROUNDS = 9
CODE = """
import json, time
from airflow.sdk import DAG, BaseOperator, Param
started = time.perf_counter()
import trainwright.dags.retrain, trainwright.dags.candidates
import trainwright.dags.calibrate_pool, trainwright.dags.analyze_history
parsed = time.perf_counter() - started
started = time.perf_counter()
import trainwright.dags.retrain, trainwright.dags.candidates
import trainwright.dags.calibrate_pool, trainwright.dags.analyze_history
print(json.dumps([parsed, time.perf_counter() - started]))
"""


def main() -> None:
    """Print median and spread."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    rounds = []
    for _ in range(ROUNDS):
        done = subprocess.run(
            [sys.executable, "-c", CODE], capture_output=True, text=True, check=True
        )
        rounds.append(json.loads(done.stdout.splitlines()[-1]))
    parsed, floor = ([one[k] for one in rounds] for k in (0, 1))
    print(f"DAG files beyond Airflow's import, {ROUNDS} fresh processes")
    print(
        f"  parse        median {statistics.median(parsed):.4f} s   "
        f"min {min(parsed):.4f}   max {max(parsed):.4f}"
    )
    print(f"  noise floor  median {statistics.median(floor):.6f} s   max {max(floor):.6f}")


if __name__ == "__main__":
    main()
