"""A small table with text and gaps, and jobs for it on an emulated device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from trainwright.tasks.spec.job import Job, load_job

ROWS = 400


def write_table(path: Path, rows: int = ROWS) -> Path:
    """Two numbers, one of them with gaps, a text, and classes that depend on all three."""
    draw = np.random.default_rng(0)
    a, b = draw.normal(size=rows), draw.normal(size=rows)
    colours = draw.choice(["red", "green", "blue"], rows)
    positive = a + b + 2.0 * (colours == "red") > 0.5
    labels = np.where(positive, "yes", "no")
    second = ["" if n % 10 == 3 else f"{b[n]:.4f}" for n in range(rows)]
    lines = [f"{a[n]:.4f},{second[n]},{colours[n]},{labels[n]}" for n in range(rows)]
    path.write_text("\n".join(["a,b,colour,label", *lines]) + "\n")
    return path


def table_job(folder: Path, **fields: Any) -> Job:
    """A job without a model on one fast emulated device, which needs no calibration."""
    table, pool = folder / "table.csv", folder / "pool.yaml"
    if not table.exists():
        write_table(table)
    pool.write_text(
        "name: one\nhosts: [{name: here, address: localhost, devices: "
        "[{type: emulated, speed: 1.0e6}]}]\nprices: {emulated: 0.5/h, energy: 0.25/kWh}\n"
    )
    values = {
        "name": "small",
        "pool": str(pool),
        "data": {"uri": str(table)},
        "recommend": {"probe": "never"},
    } | fields
    return load_job(values)
