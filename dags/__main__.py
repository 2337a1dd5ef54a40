"""`python -m trainwright.dags MOMENT CONF`: run the `retrain` DAG once, in this process.

MOMENT (ISO 8601) names the DAG run, CONF (JSON) holds its parameters. Exits with 0 if every task
succeeded, 1 otherwise.
"""

from __future__ import annotations

import json
import sys
from datetime import datetime


def main() -> int:
    """Run the DAG with the parameters given as arguments."""
    from airflow.sdk import DagRunState

    from trainwright.dags.retrain import retrain

    for task in retrain.tasks:
        task.retries = 0  # the caller sees the error, and decides whether to start again
    retrain.get_task("approve").unattended = True  # no UI shows this DAG run
    moment = datetime.fromisoformat(sys.argv[1])
    run = retrain.test(run_after=moment, run_conf=json.loads(sys.argv[2]))
    return 0 if run.state == DagRunState.SUCCESS else 1


if __name__ == "__main__":
    raise SystemExit(main())
