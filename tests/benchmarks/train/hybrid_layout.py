"""A network like AlexNet on two hosts: hybrid against its pure forms, and unlike devices.

    python tests/benchmarks/train/hybrid_layout.py [--rate 500] [--batch 64] [--speeds 0.5 0.25]
        [--width 1024] [--steps 10] [--blocks 5]

Convolutions compute most and have few parameters; the dense head has nearly all parameters. The
pure forms are data parallel, and every layer that permits it sharded by rows: also the convolutions
of 1 × 1, whose inputs are large. Each is planned and trained by real ranks on the hosts of a lab
(`tests/lab.py`, needs root); computing is emulated by layer, messages are real. Ideal is the time
of the joint batch at the sum of the devices' speeds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))

from lab import running
from layout_choice import planned, request_of, step_times

from trainwright.estimator.devices import EMULATED_SAMPLE_S
from trainwright.tasks.spec.train_spec import LayoutSpec

MODEL = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
            nn.Conv2d(32, 64, 1), nn.ReLU(),
            nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(),
            nn.Conv2d(64, 32, 1), nn.ReLU(), nn.MaxPool2d(2),
        )
        self.fc6 = nn.Linear(512, WIDTH)
        self.fc7 = nn.Linear(WIDTH, WIDTH)
        self.fc8 = nn.Linear(WIDTH, 10)

    def forward(self, images):
        found = torch.relu(self.fc6(self.convolutions(images).flatten(1)))
        return self.fc8(torch.relu(self.fc7(found)))


def build_model(norm=False, dropout=0.0, broken=False):
    return Net()
"""
LAYOUTS = {
    "data parallel": "data-parallel",
    "sharded": LayoutSpec(dense="rows"),
    "hybrid": "hybrid",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=float, default=500, help="of each host's link, Mbit/s")
    parser.add_argument("--batch", type=int, default=64, help="samples of a step")
    parser.add_argument("--speeds", type=float, nargs=2, default=[0.5, 0.25], help="of the devices")
    parser.add_argument("--width", type=int, default=1024, help="of the dense layers")
    parser.add_argument("--steps", type=int, default=10, help="of each training")
    parser.add_argument("--blocks", type=int, default=5)
    asked_for = parser.parse_args()
    source = MODEL.replace("WIDTH", str(asked_for.width))
    times: dict[str, list[float]] = {name: [] for name in LAYOUTS}
    words: dict[str, str] = {}
    with running(cores=[None, None], rate=f"{asked_for.rate:g}mbit", private_size="1g") as made:
        for _ in range(asked_for.blocks):
            for name, layout in LAYOUTS.items():
                with tempfile.TemporaryDirectory() as folder:
                    asked = request_of(Path(folder), made, source, asked_for.batch, asked_for)
                    plan = planned(
                        made, asked, asked_for.rate, asked_for.speeds, asked_for.batch, layout
                    )
                    words[name] = plan.layout_in_words
                    times[name].append(statistics.median(step_times(asked, plan)))
    ideal_s = asked_for.batch * EMULATED_SAMPLE_S / sum(asked_for.speeds)
    for name, found in times.items():
        median = statistics.median(found)
        print(
            f"{name:14} {1e3 * median:7.1f} ms ({1e3 * min(found):.1f} to {1e3 * max(found):.1f}), "
            f"{100 * ideal_s / median:.0f} % of ideal: {words[name]}"
        )
    pure = min(statistics.median(times[name]) for name in ("data parallel", "sharded"))
    print(
        f"hybrid is {pure / statistics.median(times['hybrid']):.2f} times as fast as the better one"
    )


if __name__ == "__main__":
    main()
