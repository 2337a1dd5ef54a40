"""The gate on a large table: seconds and peak memory of `validate`, of the process that checks.

Usage: python tests/benchmarks/validate/gate.py [--rows N] [--pandas]

Makes a parquet file with five columns (two of normal and lognormal numbers, one of whole numbers,
one of texts, three classes), checks it by an inferred suite, and then by that suite. With
`--pandas` it also runs the same suite with Great Expectations on a pandas frame.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from trainwright.tasks.spec.data_spec import DataSpec
from trainwright.tasks.validate.check import validate

BAR_S, BAR_BYTES = 30.0, 1e9
PANDAS = """
import json, resource, sys
import pandas as pd
from trainwright.tasks.validate.gx_run import run_on_frame
frame = pd.read_parquet(sys.argv[1])
frame["rows with this label"] = frame.groupby("label")["label"].transform("size")
frame["share of this label"] = frame["rows with this label"] / len(frame)
found = run_on_frame(frame, json.loads(sys.argv[2]))
print(found["success"], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def make_table(path: Path, rows: int) -> None:
    """Write the table in row groups of a million rows."""
    random = np.random.default_rng(0)
    names = np.array(["red", "green", "blue", "black", "white"])
    writer = None
    for first in range(0, rows, 1_000_000):
        size = min(1_000_000, rows - first)
        part = pa.table(
            {
                "a": random.normal(size=size),
                "b": random.lognormal(size=size),
                "count": random.poisson(3, size),
                "colour": names[random.integers(0, 5, size)],
                "label": random.integers(0, 3, size),
            }
        )
        writer = writer or parquet.ParquetWriter(path, part.schema)
        writer.write_table(part)
    if writer is not None:
        writer.close()


def main() -> None:
    """Make the table, check it twice, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--pandas", action="store_true", help="also with pandas")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.parquet"
        make_table(path, options.rows)
        print(f"{options.rows:,} rows, {path.stat().st_size / 1e6:.0f} MB")
        suite = None
        for name in ("inferred", "kept"):
            begun, before = time.monotonic(), os.times()
            found = validate(DataSpec(uri=str(path)), kept_suite=suite)
            duration_s, after = time.monotonic() - begun, os.times()
            cpu_s = sum(after[2:4]) - sum(before[2:4])  # of child processes
            peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
            met = duration_s <= BAR_S and peak <= BAR_BYTES
            print(
                f"{name}: {len(found.expectations)} expectations on {found.checked_rows:,} rows "
                f"in {duration_s:.1f} s (CPU time {cpu_s:.1f} s), at most {peak / 1e6:.0f} MB; "
                f"success {found.success}; "
                f"bar {BAR_S:.0f} s and {BAR_BYTES / 1e9:.0f} GB: {'met' if met else 'missed'}"
            )
            suite = found.suite
        if options.pandas:
            begun = time.monotonic()
            answer = subprocess.run(
                [sys.executable, "-c", PANDAS, str(path), json.dumps(suite)],
                capture_output=True,
                text=True,
                check=True,
            ).stdout.split()
            print(
                f"pandas: {time.monotonic() - begun:.1f} s, {int(answer[1]) * 1024 / 1e6:.0f} MB; "
                f"success {answer[0]}"
            )


if __name__ == "__main__":
    main()
