"""The training loop's cost per step on top of the model's own step, predicted and measured.

    python tests/benchmarks/train/loop_cost.py [--batches …]

The loop's cost is measured as in calibration, with models other than those below. For each model
below, its own step and the training's step are timed in random order, by the thread's CPU time,
which is least sensitive to a busy machine. The training's step is compared with the model's own
step, with and without the predicted term. Both steps are measured, so the error is that of the
term, not of the calibration. The noise floor is the difference between the medians of two halves
of the measurements.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from trainwright.estimator.memory.freed_memory import keep_freed_memory
from trainwright.tasks.spec.job import Job
from trainwright.tasks.train.worker.measure_loop import Case, case_of, measure_loop, time_cases

ROWS = 1200
SOURCE = """
import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(500, 64), nn.Parameter(torch.zeros(16, 64))
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 4)

    def forward(self, tokens):
        return self.head(self.layers(self.words(tokens) + self.places).mean(1))


def build_model(kind):
    if kind == "mlp":
        return nn.Sequential(
            nn.Linear(24, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4)
        )
    if kind == "transformer":
        return Encoder()
    norm = nn.BatchNorm2d if kind == "cnn with norms" else lambda width: nn.Identity()
    blocks, channels = [], 3
    for width in (16, 32):
        blocks += [nn.Conv2d(channels, width, 3, padding=1), norm(width), nn.ReLU()]
        blocks.append(nn.MaxPool2d(2))
        channels = width
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4))
"""
SHAPES = {"mlp": (24,), "transformer": (16,), "cnn": (3, 16, 16), "cnn with norms": (3, 16, 16)}


def job_of(folder: Path, kind: str, batch: int) -> Job:
    """A job that trains this model with this batch."""
    draw, shape, table = (
        np.random.default_rng(0),
        (ROWS, *SHAPES[kind]),
        folder / f"{kind.replace(' ', '-')}.npz",
    )
    words = (
        draw.integers(0, 500, shape)
        if kind == "transformer"
        else draw.random(shape, dtype=np.float32)
    )
    np.savez(table, inputs=words, label=draw.integers(0, 4, ROWS))
    tasks = {"mlp": "tabular-classification", "transformer": "text-classification"}
    return Job.model_validate(
        {
            "name": "measured",
            "data": {
                "uri": str(table),
                "target": "label",
                "task": tasks.get(kind, "image-classification"),
            },
            "model": {"source": str(folder / "models.py"), "config": {"kind": kind}},
            "train": {"global_batch_size": batch, "epochs": 100_000, "adaptive_split": False},
        }
    )


def apart(seen: Sequence[float]) -> float:
    """The relative difference of the medians of the even and the odd measurements."""
    return abs(statistics.median(seen[::2]) - statistics.median(seen[1::2])) / statistics.median(
        seen
    )


def main() -> None:
    """Measure the loop, then the cases; print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=40.0, help="in total for all cases")
    parser.add_argument(
        "--loop-seconds", type=float, default=3.0, help="for the loop, as in calibration"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 128, 512])
    parser.add_argument(
        "--given-back",
        action="store_true",
        help="let glibc return freed memory to the kernel, as it does by default",
    )
    given = parser.parse_args()
    if not given.given_back:
        keep_freed_memory()
    with tempfile.TemporaryDirectory(prefix="trainwright-loop-cost-") as name:
        folder = Path(name)
        (folder / "models.py").write_text(SOURCE)
        (folder / "loop").mkdir()
        cost = measure_loop(given.loop_seconds, folder / "loop")
        torch.set_num_threads(1)
        cases: dict[tuple[str, int], Case] = {
            (kind, batch): case_of(job_of(folder, kind, batch), folder / f"work {kind} {batch}")
            for kind in SHAPES
            for batch in given.batches
        }
        time_cases(list(cases.values()), given.seconds, random.Random(1))
    print(cost)
    print(
        f"{'model':16} {'batch':>5} {'own ms':>8} {'loop ms':>8} {'trained ms':>10} "
        f"{'own alone':>10} {'own + loop':>10} {'noise':>6}"
    )
    errors: tuple[list[float], list[float]] = ([], [])
    for (kind, batch), case in cases.items():
        own_s, trained_s, loop_s = (
            statistics.median(case.alone_s),
            statistics.median(case.trained_s),
            cost(case.work),
        )
        off = (own_s / trained_s - 1, (own_s + loop_s) / trained_s - 1)
        for seen, one in zip(errors, off, strict=True):
            seen.append(abs(one))
        noise = max(apart(case.trained_s), apart(case.alone_s))
        print(
            f"{kind:16} {batch:5} {own_s * 1e3:8.2f} {loop_s * 1e3:8.2f} {trained_s * 1e3:10.2f} "
            f"{off[0]:+10.1%} {off[1]:+10.1%} {noise:6.1%}"
        )
    without, with_it = (statistics.median(one) for one in errors)
    print(
        f"median error: without the term {without:.1%}, with it {with_it:.1%}; "
        f"load average {os.getloadavg()[0]:.1f}"
    )


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # the savers' threads never end
