"""`python -m trainwright.dags CONF`: run the `retrain` DAG once, in this process, with CONF (JSON) as its parameters.

Ends with 0 where every task succeeded, 1 otherwise.
"""

from __future__ import annotations

import json
import sys


def main() -> int:
    """Run the DAG with the parameters that the first argument holds."""
    from airflow.sdk import DagRunState

    from trainwright.dags.retrain import retrain

    for task in retrain.tasks:
        task.retries = 0  # whoever started this process sees why it failed, and starts it again
    run = retrain.test(run_conf=json.loads(sys.argv[1]))
    return 0 if run.state == DagRunState.SUCCESS else 1


if __name__ == "__main__":
    raise SystemExit(main())
