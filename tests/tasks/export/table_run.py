"""A finished run of a small table: numbers with gaps, categories that only some rows have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from stored_run import stored_run

from trainwright.tasks.runs.run import Run

MODEL = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.dense = nn.Embedding(40, 4), nn.Linear(6, 2)
    def forward(self, x):
        numbers = x["numbers"]
        return self.dense(torch.cat([torch.where(numbers.isnan(), 0, numbers),
                                     self.embed(x["categories"])[:, 0]], 1))
build_model = Net
"""
BRANCHES = """
class Gate(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else 2 * x
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.dense, self.gate = nn.Embedding(40, 4), nn.Linear(6, 2), Gate()
    def forward(self, x):
        numbers = x["numbers"]
        return self.gate(self.dense(torch.cat([torch.where(numbers.isnan(), 0, numbers),
                                               self.embed(x["categories"])[:, 0]], 1)))
build_model = Net
"""
RARE = """
class Square(nn.Module):
    def forward(self, x):
        return torch.special.i1e(x)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.dense, self.square = nn.Embedding(40, 4), nn.Linear(6, 2), Square()
    def forward(self, x):
        numbers = x["numbers"]
        return self.square(self.dense(torch.cat([torch.where(numbers.isnan(), 0, numbers),
                                                 self.embed(x["categories"])[:, 0]], 1)))
build_model = Net
"""
ROWS = 300


def table_run(folder: Path) -> Run:
    """A run of the table; columns are called `a`, `output` (as an output is) and `colour`."""
    rng = np.random.default_rng(0)
    colours = [["red", "green", None, f"rare{n % 8}"][n % 4 if n % 40 else 3] for n in range(ROWS)]
    numbers = [None if n % 9 == 0 else float(n % 17) for n in range(ROWS)]
    table = pa.table(
        {
            "a": pa.array(numbers, pa.float64()),
            "colour": colours,
            "output": rng.normal(size=ROWS),
            "kind": [["low", "high"][n % 17 > 8] for n in range(ROWS)],
        }
    )
    path = folder / "table.parquet"
    pq.write_table(table, path)
    return stored_run(folder, MODEL, {"uri": str(path), "target": "kind", "missing": "keep"})
