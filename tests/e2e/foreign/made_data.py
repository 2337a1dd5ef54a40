"""A task that several of the users' DAGs share."""

import os
import random
from pathlib import Path

from airflow.sdk import task


@task
def make_data() -> str:
    """A table of two classes that a line separates."""
    rows = [[random.gauss(0, 1) for _ in range(4)] for _ in range(400)]
    path = Path(os.environ["FOREIGN_OUT"])
    lines = [
        ",".join([*(f"{value:.4f}" for value in row), "up" if sum(row) > 0 else "down"])
        for row in rows
    ]
    path.write_text("\n".join(["a,b,c,d,label", *lines]) + "\n")
    return str(path)
