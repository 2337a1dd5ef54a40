"""The DAG `calibrate_pool`, run by Airflow on the shipped pool and a missing GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import doors
import pytest
import yaml

from trainwright.estimator.predict.calibration import load
from trainwright.tasks.estimate.calibrate import cached, key
from trainwright.tasks.storage.connect import open_store

DAGS = Path(__file__).parents[2] / "dags"
RUN = """
import json, sys
from airflow.dag_processing.dagbag import DagBag
bag = DagBag(dag_folder=sys.argv[1])
assert not bag.import_errors, bag.import_errors
run = bag.dags["calibrate_pool"].test(run_conf=json.loads(sys.argv[2]))
instances = sorted(run.get_task_instances(), key=lambda one: one.map_index)
tasks = [[one.task_id, one.map_index, str(one.state)] for one in instances]
print(json.dumps({"state": str(run.state), "tasks": tasks}))
"""


@pytest.mark.slow
def test_each_device_type_is_one_task_which_measures_cpus_and_skips_gpus(
    stack: Path, tmp_path: Path
) -> None:
    from trainwright.infra.local import airflow_environment, ensure_airflow_db

    pool = yaml.safe_load((DAGS / "pools" / "two-cpus.yaml").read_text())
    pool["hosts"].append(
        {"name": "far", "address": "10.0.0.7", "devices": [{"type": "nvidia-t4", "count": 4}]}
    )
    (tmp_path / "pool.yaml").write_text(yaml.safe_dump(pool))
    store = (tmp_path / "store").as_uri()
    conf = {"pool": str(tmp_path / "pool.yaml"), "budget_s": 1, "most_drift": 1e9, "store": store}
    ensure_airflow_db(stack, DAGS)
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(DAGS / "calibrate_pool.py"), json.dumps(conf)],
        capture_output=True,
        text=True,
        env=os.environ | airflow_environment(stack, DAGS),
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == {
        "state": "success",
        "tasks": [
            ["device_types", -1, "success"],
            ["calibrate", 0, "success"],
            ["calibrate", 1, "skipped"],
        ],
    }
    [item] = open_store(store, doors.settings()).list("calibrations/")
    assert item.key == f"calibrations/cpu/{key(1)}.json"
    assert load(tmp_path / "store" / item.key) == load(cached(1, doors.settings()))
    assert "this task does not measure GPUs" in done.stdout + done.stderr
