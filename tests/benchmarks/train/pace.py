"""Measures a training's throughput from its progress events, by wall time; used by benchmarks."""

from __future__ import annotations

import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from trainwright.tasks.train.batch.sampling import samples_after

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.extend(
    str(Path(__file__).parents[2] / "tasks" / "train" / room) for room in ("", "hosts", "rank")
)

ROWS, HELD_OUT = 1797, 18
TRAIN_ROWS = ROWS - HELD_OUT
NEVER = 10**6
MODEL = """
import torch


def build_model(width):
    layers = [torch.nn.Flatten(), torch.nn.Linear(64, width), torch.nn.ReLU()]
    for _ in range(2):
        layers += [torch.nn.Linear(width, width), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(width, 10))
"""


def asked_for(
    folder: Path,
    split: list[int],
    devices: list[dict[str, Any]],
    steps: int,
    *,
    width: int = 32,
    epoch_steps: int | None = None,
    **train: Any,
) -> Any:
    """A request for about `steps` steps, with only the last checkpoint.

    Trains on the digits, or with `epoch_steps` on random images for that many steps per epoch.
    """
    from training_case import request

    epochs = max(
        1, -(-steps // epoch_steps) if epoch_steps else -(-steps * sum(split) // TRAIN_ROWS)
    )
    spec = {"optimizer": {"name": "adamw"}, **train}
    asked = request(
        folder,
        split,
        devices=devices,
        model={"width": width},
        epochs=epochs,
        validation_fraction=HELD_OUT / ROWS,
        checkpoint={"every_steps": NEVER, "keep_last": 1, "keep_best": False},
        **spec,
    )
    (Path(asked.source_folder) / "net.py").write_text(MODEL)
    return (
        asked
        if epoch_steps is None
        else _with_images(asked, folder / "images.npz", epoch_steps * sum(split))
    )


def _with_images(asked: Any, file: Path, train_rows: int) -> Any:
    import numpy as np

    from trainwright.tasks.data import dataset

    draw, rows = np.random.default_rng(0), train_rows + HELD_OUT
    images = draw.normal(size=(rows, 1, 8, 8)).astype(np.float32)
    np.savez(file, images=images, label=draw.integers(0, 10, rows))
    spec = asked.job.data.model_copy(
        update={
            "uri": str(file),
            "target": "label",
            "task": None,
            "validation_fraction": HELD_OUT / rows,
        }
    )
    job = asked.job.model_copy(update={"data": spec})
    return asked.model_copy(update={"job": job, "schema_": dataset.describe(spec)})


def paced(asked: Any, on_step: Any = None) -> tuple[list[tuple[int, float]], Any]:
    """Train; returns (step, time in s) a few times per second, and the result.

    `on_step` is called with each of these steps.
    """
    from trainwright.tasks import progress
    from trainwright.tasks.train import train

    seen: list[tuple[int, float]] = []

    def note(event: dict[str, Any]) -> None:
        if event["event"] == "train":
            seen.append((event["step"], time.perf_counter()))
            if on_step is not None:
                on_step(event["step"])

    with progress.listening(note):
        result = train(asked)
    return seen, result


def samples_per_s(
    seen: list[tuple[int, float]],
    batch: int,
    after: int = 5,
    until: int = NEVER,
    rows: int = TRAIN_ROWS,
) -> float:
    """Throughput between the observed steps from `after` to `until`.

    `rows` is the epoch's length; its last batch may be smaller.
    """
    chosen = [one for one in seen if after < one[0] <= until]
    (first, began), (last, ended) = chosen[0], chosen[-1]
    return (samples_after(last, rows, batch) - samples_after(first, rows, batch)) / (ended - began)


def middle(values: list[float]) -> str:
    """Median, minimum and maximum."""
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def median_between(values: list[float]) -> tuple[float, float, float]:
    """The median with its 95 % confidence interval (David and Nagaraja, Order Statistics, 7.1)."""
    ordered, below, number = sorted(values), 0.0, 0
    while (below := below + math.comb(len(ordered), number) * 0.5 ** len(ordered)) <= 0.025:
        number += 1
    return statistics.median(ordered), ordered[max(0, number - 1)], ordered[-max(1, number)]
