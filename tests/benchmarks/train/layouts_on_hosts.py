"""A step of a dense network on two hosts with a slow link, in each layout.

    python tests/benchmarks/train/layouts_on_hosts.py [--rate 200mbit] [--batch 64] [--steps 8]
        [--widths 9216 4096 4096 1000] [--blocks 1] [--layouts data-parallel late-multiply …]

Real ranks on the hosts of a lab (`tests/lab.py`, needs root). The layouts take turns in each block.
Printed are median and range of the step time, the ratio to data parallel's, and the bytes that a
host receives in a step, by the counters of its link.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.extend(
    str(Path(__file__).parents[2] / "tasks" / "train" / room)
    for room in ("", "hosts", "rank", "layouts")
)

import lab
from hosts_case import on_hosts
from layout_ranks import with_layout
from training_case import NO_SPARE, rows

from trainwright.tasks.train import train

MODEL = """
import torch


class Net(torch.nn.Module):
    def __init__(self, widths):
        super().__init__()
        self.repeat = widths[0] // 64
        self.dense = torch.nn.ModuleList(
            torch.nn.Linear(one, two) for one, two in zip(widths, widths[1:])
        )

    def forward(self, images):
        rows = images.flatten(1).repeat(1, self.repeat)
        for number, layer in enumerate(self.dense):
            rows = layer(rows)
            if number < len(self.dense) - 1:
                rows = torch.relu(rows)
        return rows


def build_model(norm=False, dropout=0.0, broken=False):
    return Net(WIDTHS)
"""
LAYOUTS: dict[str, dict[str, Any]] = {
    "data-parallel": {},
    "late-multiply": {"sync": "factors"},
    "late-multiply bf16": {"sync": "factors", "factor_type": "bf16"},
    "sharded": {"sync": "rows"},
}


def measured(folder: Path, made: lab.Lab, name: str, asked_for: argparse.Namespace) -> Any:
    """Step times in seconds, and the bytes that the second host receives in a step."""
    widths, batch = asked_for.widths, asked_for.batch
    kept = batch * asked_for.steps
    asked = on_hosts(
        folder,
        made,
        [batch - batch // 2, batch // 2],
        validation_fraction=1 - kept / 1797,
        backend="torch",
        optimizer={"name": "sgd"},
        checkpoint={"every_steps": 10_000},
        **NO_SPARE,
    )
    source = Path(asked.source_folder) / "net.py"
    source.write_text(MODEL.replace("WIDTHS", repr(list(widths))))
    fields = dict(LAYOUTS[name])
    sync = fields.pop("sync", None)
    names = [f"dense.{number}" for number in range(len(widths) - 1)]
    cuts = {
        one: [width - width // 2, width // 2] for one, width in zip(names, widths[1:], strict=True)
    }
    if sync is not None:
        asked = with_layout(
            asked,
            dict.fromkeys(names, sync),
            cuts if sync == "rows" else None,
            **fields,
        )
    before = received(made)
    train(asked)
    total = received(made) - before
    steps = [row["step_time_s"] for row in rows(asked, "steps-rank0")]
    return steps[1:], total / len(steps)


def received(made: lab.Lab) -> int:
    """The bytes that the second host's link has carried to it."""
    host = made.hosts[1]
    text = subprocess.run(
        host.inside("cat", "/proc/net/dev"), capture_output=True, text=True, check=True
    ).stdout
    return sum(int(line.split()[1]) for line in text.splitlines()[2:] if "lo:" not in line)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="200mbit", help="each host's link (tc syntax)")
    parser.add_argument("--batch", type=int, default=64, help="samples of a step")
    parser.add_argument("--steps", type=int, default=8, help="of each training")
    parser.add_argument("--blocks", type=int, default=1, help="trainings of each layout")
    parser.add_argument("--widths", type=int, nargs="+", default=[9216, 4096, 4096, 1000])
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    asked_for = parser.parse_args()
    times: dict[str, list[float]] = {name: [] for name in asked_for.layouts}
    sent: dict[str, float] = {}
    with lab.running(cores=[None, None], rate=asked_for.rate, private_size="4g") as made:
        for _ in range(asked_for.blocks):
            for name in asked_for.layouts:
                with tempfile.TemporaryDirectory() as folder:
                    steps, sent[name] = measured(Path(folder), made, name, asked_for)
                times[name] += steps
                print(name, [round(one, 3) for one in steps], file=sys.stderr, flush=True)
    first = statistics.median(times[asked_for.layouts[0]])
    print(f"{'layout':20} {'step, s':>8} {'range':>16} {'faster':>8} {'MB to a host':>13}")
    for name, steps in times.items():
        median = statistics.median(steps)
        spread = f"{min(steps):.2f} to {max(steps):.2f}"
        print(
            f"{name:20} {median:8.2f} {spread:>16} {first / median:7.1f} {sent[name] / 1e6:13.1f}"
        )


if __name__ == "__main__":
    main()
