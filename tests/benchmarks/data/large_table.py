"""A table of 6 GB: how much of it a rank holds, and how long its steps wait for rows.

    python tests/benchmarks/data/large_table.py [--rows 50000000] [--columns 30] [--folder FOLDER]
        [--width 128] [--batch 4096] [--steps 2000]

Makes a folder of parquet files (once per folder), prepares it, opens it again as a second start
does, and trains an MLP with the training loop's own step on one rank with one thread. Each part
runs in a process of its own, whose memory is read from /proc every 10 ms.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

_FILE_ROWS = 1_000_000
_MODEL = """
from torch import nn


def build_model(columns, width):
    return nn.Sequential(
        nn.Linear(columns, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, 2),
    )
"""


def make(folder: Path, rows: int, columns: int) -> None:
    """Write the files: numbers, and a label that depends on them."""
    import pyarrow as pa
    from pyarrow import parquet

    folder.mkdir(parents=True, exist_ok=True)
    weights = np.random.default_rng(0).normal(size=columns).astype(np.float32)
    for number, begin in enumerate(range(0, rows, _FILE_ROWS)):
        draw = np.random.default_rng([1, number])
        values = draw.random((min(_FILE_ROWS, rows - begin), columns), dtype=np.float32) - 0.5
        table = {f"x{at}": values[:, at] for at in range(columns)}
        table["label"] = (values @ weights > 0).astype(np.int8)
        parquet.write_table(
            pa.table(table),
            folder / f"{number:04d}.parquet",
            compression="NONE",
            use_dictionary=False,
        )


def memory_mb() -> tuple[float, float]:
    """Private and resident memory of this process."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    private, resident = (int(fields[name].split()[0]) / 1024 for name in ("RssAnon", "VmRSS"))
    return private, resident


class Peak:
    """The greatest memory while it watches, above that at its start."""

    def __init__(self) -> None:
        self.before, self.most = memory_mb(), memory_mb()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            now = memory_mb()
            self.most = (max(self.most[0], now[0]), max(self.most[1], now[1]))
            time.sleep(0.01)

    def said(self) -> str:
        """In words."""
        (private, resident), (most_private, most) = self.before, self.most
        return (
            f"private memory {private:.0f} MB, at most {most_private:.0f} MB "
            f"({most_private - private:+.0f}); resident {resident:.0f} MB, at most {most:.0f} MB "
            f"({most - resident:+.0f})"
        )


def prepare(asked: argparse.Namespace, home: Path) -> None:
    """Prepare the data, or map what is prepared."""
    from trainwright.tasks.data.prepared import prepared
    from trainwright.tasks.spec.data_spec import DataSpec

    peak, started = Peak(), time.perf_counter()
    found = prepared(DataSpec(uri=str(asked.folder)), home)
    took = time.perf_counter() - started
    print(
        f"{found.schema.rows:,} rows of {found.row_bytes} bytes ready after {took:.2f} s; "
        f"{peak.said()}",
        flush=True,
    )


def train(asked: argparse.Namespace, home: Path) -> None:
    """Train an MLP, and print what the steps waited for."""
    model = {"columns": asked.columns, "width": asked.width}
    print(timed_steps(str(asked.folder), _MODEL, model, asked.batch, asked.steps, home), flush=True)


def timed_steps(
    uri: str, source: str, config: dict[str, int], batch: int, steps: int, home: Path
) -> str:
    """Train on one rank by the training loop's own step. Returns what the steps waited for."""
    import torch

    from trainwright.tasks.data.prepared import prepared
    from trainwright.tasks.spec.job import Job
    from trainwright.tasks.train.exchange.peers import Peers
    from trainwright.tasks.train.rank.rank import Rank
    from trainwright.tasks.train.worker import measure_loop
    from trainwright.tasks.train.worker.loop import Training
    from trainwright.tasks.train.worker_group import WorkerGroup

    torch.set_num_threads(1)
    model = home / "model.py"
    home.mkdir(exist_ok=True)
    model.write_text(source)
    train = {
        "global_batch_size": batch,
        "epochs": 100_000,
        "learning_rate": 1e-3,
        "adaptive_split": False,
    }
    job = Job.model_validate(
        {
            "name": "timed",
            "data": {"uri": uri},
            "model": {"source": str(model), "config": config},
            "train": train,
        }
    )
    torch.nn.Linear(8, 8)(torch.ones(8, 8)).sum().backward()  # loads what every rank loads
    peak = Peak()
    dataset = prepared(job.data, home)
    request = measure_loop._request(job, dataset.schema, home / "work")
    rank = Rank(request, dataset, Peers("torch"), torch.device("cpu"), 0)
    training = Training(rank, measure_loop._Unheard(), measure_loop._order(request))
    training.enter(
        WorkerGroup(generation=1, members=[0], rendezvous="", checkpoint=None, reason="measured")
    )
    epoch, begun, losses = 0, 0, list[float]()
    order = rank.epoch_order(0)
    rank.loader.wait_s, started = 0.0, time.perf_counter()
    for step in range(steps):
        if step == 1:  # the first step waits for the first window
            first_s, rank.loader.wait_s, started = rank.loader.wait_s, 0.0, time.perf_counter()
        training.step(order, begun)
        begun += batch
        if begun >= len(order):
            epoch, begun = epoch + 1, 0
            order = rank.epoch_order(epoch)
        assert training.last is not None
        losses.append(training.last["row"]["loss"])
    took, waited = time.perf_counter() - started, rank.loader.wait_s
    return (
        f"{steps - 1} steps of {1e3 * took / (steps - 1):.2f} ms, waiting "
        f"{1e3 * waited / (steps - 1):.3f} ms for rows ({waited / took:.1%}; bar 2 %), before the "
        f"first step {first_s:.2f} s; loss {np.mean(losses[:20]):.3f} to "
        f"{np.mean(losses[-20:]):.3f}; {peak.said()}"
    )


def apart(work: Callable[..., None], *given: Any) -> None:
    """Do it in a process of its own."""
    process = multiprocessing.get_context("spawn").Process(target=work, args=given)
    process.start()
    process.join()
    assert process.exitcode == 0


def main() -> None:
    """Make, prepare, map and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=50_000_000)
    parser.add_argument("--columns", type=int, default=30)
    parser.add_argument("--folder", type=Path, help="default: a temporary one, removed at the end")
    parser.add_argument("--width", type=int, default=128, help="of the MLP's two hidden layers")
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=2000)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        asked.folder = asked.folder or Path(name) / "table"
        if not list(asked.folder.glob("*.parquet")):
            apart(make, asked.folder, asked.rows, asked.columns)
        size = sum(path.stat().st_size for path in asked.folder.iterdir())
        print(f"{asked.folder}: {size / 1e9:.2f} GB", flush=True)
        home = Path(name) / "home"
        for _ in range(2):
            apart(prepare, asked, home)
        apart(train, asked, home)


if __name__ == "__main__":
    main()
