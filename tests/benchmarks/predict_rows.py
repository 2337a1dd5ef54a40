"""Rows a second and memory of `predict`, with tables of two sizes.

    python tests/benchmarks/predict_rows.py [--rows 500000 2000000] [--columns 10]

Trains a small network on a table of numbers, and predicts tables of random rows in a process of its
own for each. Bar: the memory of that process does not grow with the table (at most 10 %). The
sandbox's processes are not counted: each gets one chunk.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / name) for name in (".", "tasks", "tasks/train", "tasks/inference")]

MODEL = """
def build_model():
    return nn.Sequential(nn.LazyLinear(256), nn.ReLU(), nn.Linear(256, 3))
"""
PREDICT = """
import json, resource, sys, time
from trainwright.tasks.inference import predict
from trainwright.tasks.runs.run import Run
from trainwright.tasks.settings import Settings
began = time.perf_counter()
found = predict(Run(sys.argv[1], Settings.from_environment()), sys.argv[2], sys.argv[3])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({"rows": found.rows, "s": time.perf_counter() - began, "peak_mib": peak}))
"""


def _write_table(path: Path, rows: int, columns: int) -> None:
    """A table of random numbers and three classes, written in groups."""
    import numpy as np
    import pyarrow as pa
    from pyarrow import parquet

    random, writer = np.random.default_rng(0), None
    for at in range(0, rows, 100_000):
        count = min(100_000, rows - at)
        values = random.normal(size=(columns, count)).astype(np.float32)
        named = {f"c{number}": one for number, one in enumerate(values)}
        table = pa.table({**named, "label": np.argmax(values[:3], axis=0)})
        writer = writer or parquet.ParquetWriter(path, table.schema)
        writer.write_table(table)
    assert writer is not None
    writer.close()


def main() -> None:
    """Print rows a second and peak memory for each size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[500_000, 2_000_000])
    parser.add_argument("--columns", type=int, default=10)
    given = parser.parse_args()
    from stored_run import stored_run

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["TRAINWRIGHT_HOME"] = str(folder / "home")
        _write_table(folder / "train.parquet", 2000, given.columns)
        code = MODEL.replace("LazyLinear(", f"Linear({given.columns}, ")
        data = {"uri": str(folder / "train.parquet"), "task": "tabular-classification"}
        run = stored_run(folder, code, data)
        peaks = []
        for rows in given.rows:
            _write_table(folder / "rows.parquet", rows, given.columns)
            began = time.perf_counter()
            command = [sys.executable, "-c", PREDICT, run.uri]
            out = str(folder / f"out-{rows}.parquet")
            done = subprocess.run(
                [*command, str(folder / "rows.parquet"), out],
                capture_output=True,
                text=True,
                check=True,
            )
            found = json.loads(done.stdout.splitlines()[-1])
            peaks.append(found["peak_mib"])
            print(
                f"{rows:,} rows: {rows / found['s']:,.0f} rows/s, {found['s']:.1f} s "
                f"({time.perf_counter() - began:.1f} s with start), "
                f"peak {found['peak_mib']:.0f} MiB"
            )
        print(f"memory of the largest over the smallest: {peaks[-1] / peaks[0]:.2f} (bar 1.10)")


if __name__ == "__main__":
    main()
