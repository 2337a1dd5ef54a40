"""Imports the tasks' modules once, in the process from which tasks are forked.

Airflow's scheduler forks the LocalExecutor's workers, and these fork a process for each task: a
module that the scheduler has imported costs a task nothing. All of these modules are light (no
torch, numpy, pandas). Restart the scheduler after an update of trainwright.
"""

from __future__ import annotations

import importlib
import sys

from airflow.sdk.configuration import conf

MODULES = (
    "minio",
    "trainwright.operators.deadline",
    "trainwright.operators.promote",
    "trainwright.operators.triggers",
    "trainwright.tasks.promote",
    "trainwright.tasks.spec.form",
    "trainwright.tasks.storage.s3",
    "trainwright.tasks.train.launcher.background",
)
"""In addition to each step's module and operator."""


def preload() -> None:
    """Import the modules if this process is a scheduler whose executor forks."""
    if sys.argv[1:2] == ["scheduler"] and "LocalExecutor" in conf.get("core", "executor"):
        from trainwright.tasks import chain

        operators = [step.operator.partition(":")[0] for step in chain.steps()]
        for name in (*MODULES, *operators, *(step.module for step in chain.steps())):
            importlib.import_module(name)
        sys.modules["trainwright.tasks.spec.form"].job_schema()
