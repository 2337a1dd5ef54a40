"""Predicted against measured training-step time on this machine: `python tests/benchmarks/step_time_accuracy.py [SECONDS]`.

Calibrates (default 35 s), then times networks of families that calibration does not hold: interleaved, in random order, the
rounds split into two halves, whose disagreement is the noise floor. Prints median, p90 and worst error, the bias, and the
share of measurements inside the 90 % interval, beside the datasheet's roofline on the same cases.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from trainwright.estimator.measure import measure
from trainwright.estimator.source import BatchSpec, ModelDefinition
from trainwright.estimator.step_time import predict_curve
from trainwright.estimator.trace import StepSpec, trace

ROUNDS = 6


class Residual(nn.Module):
    """Two convolutions with normalisation beside a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.inner(x))


def residual(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), Residual(width), nn.MaxPool2d(2), Residual(width), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(width, 10),
    )  # fmt: skip


def attention(width: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
    return nn.Sequential(
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Flatten(), nn.Linear(16 * width, 10)
    )


def separable(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1, stride=2), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1, groups=width), nn.ReLU(),
        nn.Conv2d(width, 2 * width, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10),
    )  # fmt: skip


def digits(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(16 * width, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


FAMILIES: list[tuple[str, Callable[[int], nn.Module], tuple[int, ...], tuple[int, ...]]] = [
    ("residual", residual, (3, 16, 16), (16, 32)),
    ("attention", attention, (16, 64), (64,)),
    ("separable", separable, (3, 32, 32), (32, 64)),
    ("the digits job", digits, (1, 8, 8), (64,)),
]


def stepper(build: Callable[[int], nn.Module], width: int, shape: tuple[int, ...], batch: int) -> Callable[[], Any]:
    torch.manual_seed(0)
    model = build(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
    inputs, targets = torch.rand(batch, *shape), torch.randint(0, 10, (batch,))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    return step


def timed(step: Callable[[], Any]) -> float:
    step()
    started = time.perf_counter()
    step()
    repeats = max(2, int(0.05 / max(time.perf_counter() - started, 1e-6)))
    started = time.perf_counter()
    for _ in range(repeats):
        step()
    return (time.perf_counter() - started) / repeats


def main() -> None:
    """Measure, compare, print one table."""
    budget = float(sys.argv[1]) if len(sys.argv) > 1 else 35.0
    torch.set_num_threads(1)
    calibration = measure(budget, 1, lambda _: None)
    cases = []
    for name, build, shape, widths in FAMILIES:
        for width in widths:
            for batch in (8, 32, 96):
                spec = BatchSpec(
                    inputs={"inputs": shape}, input_dtypes={"inputs": "float32"}, target_dtype="int64", classes=10,
                    task="image-classification",
                )  # fmt: skip
                structure = trace(
                    StepSpec(ModelDefinition(build, None, None), {"width": width}, spec, {"name": "adamw"}, "fp32"),
                    batch,
                )
                step = stepper(build, width, shape, batch)
                cases.append((f"{name} {width}, batch {batch}", structure, batch, step, [], []))
    for number in range(ROUNDS):
        random.Random(number).shuffle(cases)
        for _, _, _, step, first, second in cases:
            (first if number % 2 else second).append(timed(step))
    rows, noise = [], []
    for name, structure, batch, _, first, second in sorted(cases, key=lambda case: case[0]):
        seen = statistics.median(first + second)
        noise.append(abs(statistics.median(first) / statistics.median(second) - 1))
        curve = predict_curve(structure, calibration, device_type="cpu", cores=1.0)
        sheet = predict_curve(structure, None, device_type="cpu", cores=1.0)
        guess = curve.step_time(batch)
        rows.append(
            (
                name,
                seen,
                guess.median / seen - 1,
                guess.low <= seen <= guess.high,
                sheet.step_time(batch).median / seen - 1,
            )
        )
        where = "inside" if rows[-1][3] else "outside"
        print(f"{name:28} measured {seen * 1e3:8.2f} ms   predicted {100 * rows[-1][2]:+6.1f} %   {where}")
    for label, errors in (("calibrated", [row[2] for row in rows]), ("datasheet roofline", [row[4] for row in rows])):
        size = sorted(abs(one) for one in errors)
        print(
            f"{label:20} median {100 * statistics.median(size):5.1f} %   p90 {100 * size[int(0.9 * len(size))]:5.1f} %   "
            f"worst {100 * size[-1]:5.1f} %   bias {100 * statistics.median(errors):+5.1f} %"
        )
    worst = sorted(noise)[int(0.9 * len(noise))]
    print(f"{'noise floor':20} median {100 * statistics.median(noise):5.1f} %   p90 {100 * worst:5.1f} %")
    inside = sum(row[3] for row in rows)
    print(f"inside the 90 % interval: {inside} of {len(rows)}; sentinel drift {100 * calibration.sentinel_drift:.1f} %")


if __name__ == "__main__":
    main()
