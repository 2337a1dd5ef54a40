"""Our operators in users' DAGs: a gate, sizing for a stock operator, functions."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import doors
import pytest

from trainwright.infra.local import airflow_environment, ensure_airflow_db
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.runs.artefacts.training_result import Result
from trainwright.tasks.runs.run import Run, list_runs
from trainwright.tasks.train.launcher import background

FOREIGN = Path(__file__).parent / "foreign"
POOL = Path(__file__).parents[2] / "dags" / "pools" / "two-cpus.yaml"
MODEL = """
import torch

def build_model(width=4):
    layers = torch.nn.Linear(4, width), torch.nn.ReLU(), torch.nn.Linear(width, 2)
    return torch.nn.Sequential(*layers)
"""
RUN = """
import json, sys
from airflow.dag_processing.dagbag import DagBag
bag = DagBag(dag_folder=sys.argv[1])
assert not bag.import_errors, bag.import_errors
found = {}
for name in sys.argv[2:]:
    run = bag.dags[name].test()
    instances = run.get_task_instances()
    tasks = sorted([ti.task_id, ti.map_index, str(ti.state)] for ti in instances)
    found[name] = {"state": str(run.state), "tasks": tasks}
print(json.dumps(found))
"""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def run_dags(file: str, home: Path, variables: dict[str, str], *names: str) -> dict[str, Any]:
    environment = (
        os.environ
        | airflow_environment(home, FOREIGN)
        | {f"FOREIGN_{k}": v for k, v in variables.items()}
    )
    environment["PYTHONPATH"] = str(FOREIGN)
    ensure_airflow_db(home, FOREIGN)
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(FOREIGN / file), *names],
        capture_output=True,
        text=True,
        env=environment,
        timeout=1000,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def held(runs: list[Run]) -> list[str]:
    """The leases of these runs, and all leases on devices."""
    ours = {run.uri for run in runs}
    return [
        lease.resource
        for lease in doors.ledger().held()
        if lease.run in ours or lease.resource.startswith("device ")
    ]


def job(folder: Path) -> dict[str, Any]:
    (folder / "m.py").write_text(MODEL)
    return {
        "name": "sized",
        "pool": str(POOL),
        "data": {"uri": "builtin:digits"},
        "model": {"source": str(folder / "m.py")},
        "train": {"epochs": 2, "global_batch_size": 32, "learning_rate": 0.01},
        "objective": {"minimize": "time"},
    }


def test_a_validation_gate_passes_good_data_and_stops_bad_data(stack: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.csv"
    data.write_text(
        "a,label\n" + "\n".join(f"{random.random():.3f},{i % 2}" for i in range(60)) + "\n"
    )
    variables = {"DATA": str(data)}
    for name, most in (("GOOD", 1), ("BAD", 0.1)):
        suite = [
            {
                "type": "expect_column_values_to_be_between",
                "kwargs": {"column": "a", "min_value": 0, "max_value": most},
            }
        ]
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({"expectations": suite}))
        variables[name] = str(path)
    found = run_dags("gate.py", stack, variables, "gate_good", "gate_bad")
    assert found["gate_good"] == {
        "state": "success",
        "tasks": [["check", -1, "success"], ["publish", -1, "success"]],
    }
    assert found["gate_bad"] == {
        "state": "failed",
        "tasks": [["check", -1, "failed"], ["publish", -1, "upstream_failed"]],
    }


def test_estimate_and_allocate_feed_a_stock_operator_and_the_devices_are_released(
    stack: Path, tmp_path: Path
) -> None:
    cnn = POOL.parents[1] / "jobs" / "cnn.py"
    wanted = job(tmp_path) | {"model": {"source": str(cnn), "config": {"width": 8}}}
    out = tmp_path / "devices.json"
    found = run_dags("sized.py", stack, {"JOB": json.dumps(wanted), "OUT": str(out)}, "sized")
    assert found["sized"]["state"] == "success", found
    assert sum(json.loads(out.read_text()).values()) == 32
    assert doors.ledger().held("device ") == []


def test_decorated_functions_return_the_data_to_check_and_the_jobs_to_train(
    stack: Path, tmp_path: Path
) -> None:
    out = tmp_path / "made.csv"
    wanted = {name: value for name, value in job(tmp_path).items() if name != "pool"}
    variables = {"JOB": json.dumps(wanted), "OUT": str(out), "POOL": str(POOL)}
    found = run_dags("by_function.py", stack, variables, "by_function")
    assert found["by_function"] == {
        "state": "success",
        "tasks": [
            ["check", -1, "success"],
            ["compare", -1, "success"],
            ["make_data", -1, "success"],
            ["train", 0, "success"],
            ["train", 1, "success"],
        ],
    }
    runs = [
        next(iter(list_runs(doors.settings().store, doors.settings(), f"by-function-{width}")))
        for width in (2, 4)
    ]
    for run in runs:
        assert run.job().data.uri == str(out)
        assert doors.run_at(run.uri).read(Result).state == "success"
        assert background.launcher(run) is None
        assert len(run.read(Plan).devices) >= 1
    assert held(runs) == []
