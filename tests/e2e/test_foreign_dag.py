"""Runs the README's example of our operators in a user's DAG, unchanged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import doors
from doc_pages import README, ROOT, example

from trainwright.tasks.leases.ledger import Ledger
from trainwright.tasks.runs.run import list_runs

RUN = """
import json, sys
from airflow.dag_processing.dagbag import DagBag
bag = DagBag(dag_folder=sys.argv[1])
assert not bag.import_errors, bag.import_errors
run = bag.dags["foreign"].test()
states = {ti.task_id: str(ti.state) for ti in run.get_task_instances()}
print(json.dumps({"state": str(run.state), "tasks": states}))
"""


def test_the_readmes_foreign_dag_runs_to_success(stack: Path, tmp_path: Path) -> None:
    from trainwright.infra.local import airflow_environment, ensure_airflow_db

    folder = tmp_path / "dags"
    folder.mkdir()
    source = example(README, "foreign DAG").replace("MODELS", str(ROOT / "dags" / "jobs"))
    (folder / "foreign.py").write_text(source)
    environment = os.environ | airflow_environment(stack, folder)
    ensure_airflow_db(stack, folder)
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(folder / "foreign.py")],
        capture_output=True,
        text=True,
        env=environment,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert Ledger(doors.settings().ledger_url).held() == []
    assert result == {
        "state": "success",
        "tasks": {"check": "success", "train": "success", "publish": "success"},
    }
    run = next(iter(list_runs(doors.settings().store, doors.settings())))
    assert (run.status().state, run.status().step) == ("success", None)
