"""What a step's task imports, imported once by the process from which tasks are forked.

Airflow's scheduler forks the LocalExecutor's workers, and these a process for each task: what the scheduler has imported costs a
task nothing. All of it is light (no torch, numpy, pandas); after an update of trainwright the scheduler is started anew.
"""

from __future__ import annotations

import importlib
import sys

from airflow.sdk.configuration import conf

MODULES = (
    "minio",
    "trainwright.operators.allocate",
    "trainwright.operators.analyze",
    "trainwright.operators.deadline",
    "trainwright.operators.estimate",
    "trainwright.operators.extract",
    "trainwright.operators.promote",
    "trainwright.operators.search_lr",
    "trainwright.operators.store",
    "trainwright.operators.train",
    "trainwright.operators.triggers",
    "trainwright.operators.validate",
    "trainwright.tasks.train.launcher.background",
    "trainwright.tasks.spec.form",
    "trainwright.tasks.promote",
    "trainwright.tasks.storage.s3",
)


def preload() -> None:
    """Import it, where this process is a scheduler whose executor forks."""
    if sys.argv[1:2] == ["scheduler"] and "LocalExecutor" in conf.get("core", "executor"):
        for name in MODULES:
            importlib.import_module(name)
        sys.modules["trainwright.tasks.spec.form"].job_schema()
