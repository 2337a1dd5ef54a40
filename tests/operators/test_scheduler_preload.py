"""The imports of the process that forks tasks, each time in a new interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainwright.tasks import chain

LOAD = """
import json, sys
from trainwright.operators.plugin import TrainwrightPlugin
sys.argv[1:] = {arguments}
before = set(sys.modules)
TrainwrightPlugin.on_load()
loaded = sorted(set(sys.modules) - before)
import trainwright.dags.retrain
late = set(sys.modules) - before - set(loaded)
late = sorted(name for name in late if name.startswith("trainwright"))
print("LOADED", json.dumps([loaded, late]))
"""
HEAVY = {"torch", "numpy", "pandas", "scipy", "great_expectations", "dask", "horovod"}


def loaded(home: Path, arguments: list[str], executor: str) -> Any:
    environment = os.environ | {"AIRFLOW_HOME": str(home), "AIRFLOW__CORE__EXECUTOR": executor}
    command = [sys.executable, "-c", LOAD.format(arguments=arguments)]
    output = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout
    return json.loads(output.rpartition("LOADED ")[2])


def test_a_scheduler_that_forks_tasks_preloads_their_modules_and_nothing_heavy(
    tmp_path: Path,
) -> None:
    modules, late = loaded(tmp_path, ["scheduler", "--skip-serve-logs"], "LocalExecutor")
    assert {
        "minio",
        *(one.module for one in chain.steps()),
        "trainwright.tasks.runs.run",
        "trainwright.operators.train",
    } <= set(modules)
    assert not HEAVY & set(modules)
    assert set(late) <= {"trainwright.dags", "trainwright.dags.retrain", "trainwright.dags.chain"}


@pytest.mark.parametrize(
    ("arguments", "executor"),
    [
        (["scheduler"], "CeleryExecutor"),
        (["dag-processor"], "LocalExecutor"),
        ([], "LocalExecutor"),
    ],
)
def test_no_other_airflow_process_preloads(
    tmp_path: Path, arguments: list[str], executor: str
) -> None:
    modules, _ = loaded(tmp_path, arguments, executor)
    assert {name for name in modules if name.startswith("trainwright")} <= {
        "trainwright.operators.preload"
    }
