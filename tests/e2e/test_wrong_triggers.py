"""DAGs triggered untouched or with a wrong value: one line in the task's log, and no retry."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainwright.infra.local import airflow_environment, ensure_airflow_db

DAGS = Path(__file__).parents[2] / "dags"
RUN = """
import copy, json, sys
import structlog
from airflow.dag_processing.dagbag import DagBag
bag = DagBag(dag_folder=sys.argv[1])
assert not bag.import_errors, bag.import_errors
processors = structlog.get_config()["processors"]
untouched = list(processors)
for name, conf in json.loads(sys.argv[2]):
    processors[:] = untouched  # each task is a process of its own
    dag = bag.dags[name]
    offered = copy.deepcopy(dag.params)
    print("CASE", flush=True)
    run = dag.test(run_conf=conf)
    dag.params = offered
    states = {one.task_id: one for one in run.get_task_instances()}
    failed = [one for one in states.values() if str(one.state) == "failed"]
    print("ENDED", [[one.task_id, one.try_number] for one in failed], flush=True)
"""
CASES = [
    ("candidates", {}, "candidate_jobs", "jobs: got none; allowed: one or more job files"),
    ("candidates", {"jobs": ["/no.yaml"]}, "candidate_jobs", "/no.yaml: no such file"),
    ("candidates", {"jobs": [{"name": "x"}]}, "candidate_jobs", "job: data: required field is"),
    ("retrain", {"data.uri": "/no.csv"}, "validate", "data.uri: got /no.csv; there is no such"),
    ("retrain", {"train.layout": "{dense"}, "validate", "form: train.layout: not valid YAML"),
    ("retrain", {"job": "/a.yaml", "name": "x"}, "validate", "job: got '/a.yaml' and name; pass"),
    ("calibrate_pool", {"pool": "/no.yaml"}, "device_types", "pool: /no.yaml: no such file"),
    ("analyze_history", {"job": "nobody"}, "newest_runs", "job: got 'nobody', of which "),
]


@pytest.mark.slow
def test_a_wrong_trigger_fails_at_once_with_one_line_in_the_tasks_own_log(stack: Path) -> None:
    ensure_airflow_db(stack, DAGS)
    asked = json.dumps([[name, conf] for name, conf, _, _ in CASES])
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(DAGS), asked],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | airflow_environment(stack, DAGS),
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "Traceback" not in done.stdout
    _, *outputs = done.stdout.split("CASE\n")
    for (_, _, task, line), output in zip(CASES, outputs, strict=True):
        assert f"ENDED [['{task}', 1]]" in output
        assert f"bad_input: {line}" in output.partition("::endgroup::")[2]  # not in Pre Execute
