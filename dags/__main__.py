"""`python -m trainwright.dags MOMENT CONF`: run the `retrain` DAG once, in this process.

MOMENT (ISO 8601) names the DAG run, CONF (JSON) holds its parameters. Exits with 0 if every task
succeeded, 1 otherwise. A configured connection that is wrong ends it before the first task: its
last line is the error, as JSON, and it exits with the error's code.
"""

from __future__ import annotations

import gc
import json
import sys
from datetime import datetime


def main() -> int:
    """Run the DAG with the parameters given as arguments."""
    # Airflow makes many objects that stay; by default they are searched again and again at start.
    gc.set_threshold(100_000, 50, 100)
    from airflow.sdk import DagRunState

    from trainwright.infra.private_files import keep_private
    from trainwright.operators.hooks import connection_ids, settings_of
    from trainwright.tasks.errors import TrainwrightError

    keep_private()
    try:
        settings_of(connection_ids())
    except TrainwrightError as error:
        print(json.dumps({"error": error.document()}))  # noqa: T201 - for the caller
        return error.exit_code
    from trainwright.dags.retrain import retrain

    for task in retrain.tasks:
        task.retries = 0  # the caller sees the error, and decides whether to start again
    retrain.get_task("approve").unattended = True  # no UI shows this DAG run
    moment = datetime.fromisoformat(sys.argv[1])
    run = retrain.test(run_after=moment, run_conf=json.loads(sys.argv[2]))
    return 0 if run.state == DagRunState.SUCCESS else 1


if __name__ == "__main__":
    raise SystemExit(main())
