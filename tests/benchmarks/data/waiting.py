"""How long steps on small images wait for their rows: the digits, with a small CNN.

    python tests/benchmarks/data/waiting.py [--width 16] [--batch 64] [--steps 2000] [--repeats 3]

Trains by the training loop's own step on one rank with one thread. The data is small, so that its
rows are read when a step begins, and all of that counts as waiting.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from large_table import timed_steps

_MODEL = """
from torch import nn


def build_model(width):
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(), nn.Flatten(), nn.Linear(64 * width, 10),
    )
"""


def main() -> None:
    """Train several times, and print what the steps waited for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=16, help="channels of the two convolutions")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    for _ in range(asked.repeats):
        with tempfile.TemporaryDirectory() as name:
            config = {"width": asked.width}
            home = Path(name) / "home"
            print(timed_steps("builtin:digits", _MODEL, config, asked.batch, asked.steps, home))


if __name__ == "__main__":
    main()
