"""The cost of recording: a step with rows, journal, TensorBoard and progress, against one without.

    python tests/benchmarks/train/recording.py [--blocks 12] [--steps 100] [--width 256]
        [--batch 128]

Runs the loop's own step on one rank in this process, in blocks with and without recording, in
random order. The noise floor is the difference between two halves of the blocks without recording.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from one_process import Alone
from pace import asked_for

from trainwright.tasks.data import dataset
from trainwright.tasks.train.batch.sampling import epoch_order
from trainwright.tasks.train.rank.rank import Rank
from trainwright.tasks.train.record import metrics
from trainwright.tasks.train.record.journal import Journals
from trainwright.tasks.train.request import Order
from trainwright.tasks.train.worker.loop import Training
from trainwright.tasks.train.worker.state_sync import begin

WARM_UP_STEPS = 50


class Unheard:
    """A channel that discards its messages; like the real one, it is due a few times a second."""

    def __init__(self) -> None:
        self._last = 0.0

    @property
    def due(self) -> bool:
        due = time.monotonic() - self._last > 0.25
        self._last = time.monotonic() if due else self._last
        return due

    def send(self, kind: str, **fields: Any) -> None:
        return None

    def progress(self, kind: str, **fields: Any) -> None:
        return None


def nothing(*_: Any, **__: Any) -> None:
    """Replaces the recording functions in blocks without recording."""


def main() -> None:
    """Measure, and print the cost of recording per step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=12, help="of each kind")
    parser.add_argument("--steps", type=int, default=100, help="in a block")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=128)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        wanted = asked_for(Path(folder), [asked.batch], [{"type": "cpu"}], 10**6, width=asked.width)
        rank = Rank(wanted, dataset.load(wanted.job.data), Alone(), torch.device("cpu"), 0)
        order = Order(
            request=wanted,
            mode="train",
            backend="torch",
            launch="measured",
            started_at_s=time.time(),
        )
        training = Training(rank, Unheard(), order)  # type: ignore[arg-type]
        training.state = begin(training, None)
        assert training.state is not None
        training.state.members = [0]
        training._open_writer()
        rows = epoch_order(rank.train_rows, 0, 0)
        record = training.steps.add, training._show

        def block(recording: bool) -> tuple[float, float]:
            """Wall time and CPU time of a step."""
            training.steps.add, training._show = record if recording else (nothing, nothing)  # type: ignore[method-assign]
            started, used = time.perf_counter(), time.process_time()
            for at in range(asked.steps):
                training.step(rows, at * asked.batch % (len(rows) - asked.batch))
            return (time.perf_counter() - started) / asked.steps, (
                time.process_time() - used
            ) / asked.steps

        for _ in range(WARM_UP_STEPS):
            training.step(rows, 0)
        found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        for _ in range(asked.blocks):
            for recording in random.sample([True, False], 2):
                found[recording].append(block(recording))
        ((_, noted),) = Journals(Path(wanted.work_folder)).parts(10**9)
        encoding = time.perf_counter()
        metrics.encode(noted)
        encoding = time.perf_counter() - encoding
    for at, kind in enumerate(("wall time", "CPU time")):
        on, off = ([one[at] for one in found[recording]] for recording in (True, False))
        cost = statistics.median(on) - statistics.median(off)
        floor = abs(statistics.median(off[::2]) - statistics.median(off[1::2]))
        print(
            f"{kind}: {1e3 * statistics.median(off):.2f} ms per step without recording, "
            f"{1e6 * cost:+.0f} us ({cost / statistics.median(off):+.1%}) with it; noise floor "
            f"{1e6 * floor:.0f} us over {asked.blocks} blocks of {asked.steps} steps"
        )
    print(f"writing {len(noted)} rows as parquet took {1e3 * encoding:.0f} ms")


if __name__ == "__main__":
    main()
