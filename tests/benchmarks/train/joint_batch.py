"""The difference between unequal ranks and one process on the joint batch, after 50 steps.

    python tests/benchmarks/train/joint_batch.py [--backend torch|horovod]
        [--split 3:1|5:3:1:1|2:1:0] [--precision fp64|fp32]

Real ranks train a small convolutional network on the digits. The single process is plain torch
without trainwright's training code. Printed is the greatest difference of a tensor of the model,
relative to its norm, beside the bar; 0 means equal to the last bit. (For batch normalisation after
a bias, it is the difference of all tensors together, because the bias's gradient is only rounding
noise.) Batch normalisation in single precision is compared with the difference that another order
of samples makes in one process. The tests check the same bars.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.extend(
    str(Path(__file__).parents[2] / "tasks" / "train" / room) for room in ("", "hosts", "rank")
)
sys.path.append(str(Path(__file__).parents[1] / "estimator"))

from accuracy import table
from joint_batch_case import (
    BOUNDS,
    SPLITS,
    WAYS,
    flat,
    joint,
    normalized,
    normalized_single,
    relative_difference,
    trained,
)
from training_case import alone

from trainwright.tasks.train import train

STEPS, BIASED_BOUND, REORDERINGS = 50, 1e-8, 3
Row = tuple[str, ...]


def shown(found: float, bound: float) -> str:
    """A difference, marked if it misses the bar."""
    return f"{found:.1e}" if found <= bound else f"{found:.1e} missed"


def plain(backends: list[str], splits: list[str], precision: str) -> list[Row]:
    """A row for each way, a column for each library and split."""
    rows: list[Row] = [
        (
            f"{precision}, <= {BOUNDS[precision]:g}",
            *(f"{one} {each}" for one in backends for each in splits),
        )
    ]
    for way in WAYS:
        cells = []
        for backend in backends:
            for split in splits:
                with tempfile.TemporaryDirectory() as folder:
                    asked = joint(Path(folder), backend, split, way, precision)
                    train(asked)
                    found = relative_difference(trained(Path(folder) / "run", STEPS), alone(asked))
                cells.append(shown(found, BOUNDS[precision]))
        rows.append((way, *cells))
        print(" ".join(rows[-1]), file=sys.stderr, flush=True)
    return rows


def batch_norm(backends: list[str]) -> list[Row]:
    """Batch normalisation: without a bias before it, with one, and in single precision."""
    rows: list[Row] = [("batch normalisation", "bar", *backends)]
    for name, norm, bound in (
        ("fp64, no bias before it", True, BOUNDS["fp64"]),
        ("fp64, a bias before it", "biased", BIASED_BOUND),
    ):
        cells = []
        for backend in backends:
            with tempfile.TemporaryDirectory() as folder:
                asked = normalized(Path(folder), backend, norm)
                train(asked)
                found, expected = trained(Path(folder) / "run", STEPS), alone(asked)
                if norm == "biased":
                    found, expected = {"all": flat(found)}, {"all": flat(expected)}
                cells.append(shown(relative_difference(found, expected), bound))
        rows.append((name, f"{bound:g}", *cells))
    cells, bars = [], []
    for backend in backends:
        with tempfile.TemporaryDirectory() as folder:
            asked = normalized_single(Path(folder), backend)
            train(asked)
            expected = alone(asked)
            by_order = [
                relative_difference(alone(asked, reordered=seed), expected)
                for seed in range(REORDERINGS)
            ]
            bars.append(2 * statistics.median(by_order))
            found = relative_difference(trained(Path(folder) / "run", STEPS), expected)
            cells.append(shown(found, bars[-1]))
    name = "fp32; bar: twice the difference by another order of samples"
    rows.append((name, f"{bars[0]:.1e}", *cells))
    return rows


def main() -> None:
    """Train, compare, print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", choices=["torch", "horovod"], action="append")
    parser.add_argument("--split", choices=list(SPLITS), action="append")
    parser.add_argument("--precision", choices=list(BOUNDS), action="append")
    given = parser.parse_args()
    backends = given.backend or ["torch", "horovod"]
    for precision in given.precision or BOUNDS:
        print(
            table(plain(backends, given.split or list(SPLITS), precision)), end="\n\n", flush=True
        )
    print(table(batch_norm(backends)))


if __name__ == "__main__":
    main()
