"""Training on hosts with different CPU quotas, over ssh.

    python tests/benchmarks/train/hosts.py [ROUNDS] [--cores Q ...] [--rate R] [--channels C]
        [--passes P] [--backend B] [--roam] [--keep FOLDER]

Creates a lab with one host per quota of cores (`tests/lab.py`; needs root) and links of this rate,
and trains a small convolutional network there. Its channels, and its passes through the middle
layer, set the step time; the overhead per step is about constant. The quota limits the whole host
from the first step on, so that loading torch does not take longer. A first training starts with an
even split and adapts it (`adaptive_split`); its final split is measured. A second training then
runs ROUNDS rounds (default 10) of windows of steps in random order: twice with that split, once
with another one (by default the even one), and once with each host alone while the others idle.

A split's share of the ideal is given in two ways. "Of hosts alone": relative to the sum of the
hosts' speeds alone in the same round (samples by compute time, without sums). It shows how much the
library slows down computing, but also chance differences between windows. "Of their own speed":
relative to the sum of the hosts' speeds in the split's own steps, by compute time. It shows only
waiting and sums, and never exceeds 100 %. The bar applies to the lower of the two.

Printed: samples per second for each kind of window, with quartiles; both shares, as median with
95 % confidence interval; as noise, the second window with the measured split relative to the first;
and for that split the parts of a step's time: each host's compute time, beside the time it takes
alone, the slowest host's compute time, and the rest, which is sums.

The sum of the quotas should be less than the machine's free cores. Each host is pinned to one core,
because real hosts don't disturb each other (`--roam`: they may use all cores). `--keep` keeps the
folders of both trainings.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.extend(
    str(Path(__file__).parents[2] / "tasks" / "train" / room) for room in ("", "hosts", "rank")
)

import lab
from pace import median_between
from training_case import ROWS, request, rows

from trainwright.tasks import progress
from trainwright.tasks.runs.artefacts.training_result import SplitEvent
from trainwright.tasks.train import TrainRequest, train
from trainwright.tasks.train.launcher.launch import choose_backend

BATCH = 240
FREELY = 4.0
BAR = 0.9
Steps = Sequence[Sequence[dict[str, Any]]]
"""For each step, the rows of its ranks."""
WINDOW, SETTLING = 8, 2
"""Steps per window, and the number of first steps in it that are ignored."""
MODEL = """
import torch


class Net(torch.nn.Module):
    def __init__(self, channels, passes):
        super().__init__()
        self.first = torch.nn.Conv2d(1, channels, 3, padding=1)
        self.between = torch.nn.Conv2d(channels, channels, 3, padding=1)
        self.last, self.passes = torch.nn.Linear(channels * 64, 10), passes

    def forward(self, images):
        inner = torch.relu(self.first(images))
        for _ in range(self.passes):
            inner = torch.relu(self.between(inner))
        return self.last(inner.flatten(1))


def build_model(channels, passes):
    return Net(channels, passes)
"""


def on_hosts(folder: Path, made: lab.Lab, split: list[int], **wanted: Any) -> TrainRequest:
    devices = [
        {"type": "cpu", "host": one.name, "address": one.address, "id": f"{one.name}/cpu"}
        for one in made.hosts
    ]
    spec = {"checkpoint": {"every_steps": 10_000, "keep_best": False}, **wanted}
    asked = request(folder, split, devices=devices, **spec)
    (folder / "source" / "net.py").write_text(MODEL)
    (folder / "pool.json").write_text(json.dumps(made.pool([[{"type": "cpu"}]] * len(made.hosts))))
    return asked


def pin(made: lab.Lab, cores: list[float]) -> None:
    """Pin each host to the core with the most capacity left, the largest quota first."""
    left = dict.fromkeys(sorted(os.sched_getaffinity(0)), 1.0)
    for quota, host in sorted(zip(cores, made.hosts, strict=True), key=lambda one: -one[0]):
        core = max(left, key=left.__getitem__)
        left[core] -= quota
        os.sched_setaffinity(host.sshd.pid, {core})  # its children inherit it


@contextmanager
def held(made: lab.Lab, cores: list[float]) -> Iterator[None]:
    """Apply the hosts' quotas from the first step of a training on."""

    begun = False

    def listen(event: dict[str, Any]) -> None:
        nonlocal begun
        if event["event"] == "train" and not begun:
            begun = True
            for host, quota in zip(made.hosts, cores, strict=True):
                host.hold(quota)

    with progress.listening(listen):
        try:
            yield
        finally:
            for host in made.hosts:
                host.hold(FREELY)


def even(count: int) -> list[int]:
    return [BATCH // count + (number < BATCH % count) for number in range(count)]


def found_split(folder: Path, made: lab.Lab, job: dict[str, Any], epochs: int) -> list[int]:
    """The final split of a training that starts with an even one and adapts it."""
    result = train(
        on_hosts(folder, made, even(len(made.hosts)), epochs=epochs, adaptive_split=True, **job)
    )
    for event in result.split_events:
        print(f"   step {event.step}: {event.batch_sizes}")
    return [device.batch_size for device in result.devices]


def windows(
    folder: Path,
    made: lab.Lab,
    job: dict[str, Any],
    split: list[int],
    other: list[int],
    rounds: int,
    seed: int,
) -> dict[str, list[Steps]]:
    """For each kind of window, the measured steps of each round."""
    count, draw = len(made.hosts), random.Random(seed)
    kinds = {"found": split, "again": split, "other": other}
    for number in range(count):
        kinds[f"alone {number}"] = [split[number] if one == number else 0 for one in range(count)]
    order = [name for _ in range(rounds) for name in draw.sample(sorted(kinds), len(kinds))]
    events = [
        SplitEvent(step=WINDOW * at, batch_sizes=kinds[name], reason=f"{at} {name}")
        for at, name in enumerate(order)
    ]
    samples = sum(WINDOW * sum(kinds[name]) for name in order)
    asked = on_hosts(folder, made, split, epochs=-(-samples // ROWS) + 1, **job)
    train(asked.model_copy(update={"replay_events": events}))
    by_step = steps_of(asked, count)
    found: dict[str, list[Steps]] = defaultdict(list)
    for at, name in enumerate(order):
        steps = by_step[WINDOW * at + SETTLING : WINDOW * (at + 1)]
        found[name].append(
            [own for own in steps if sum(row["batch_size"] for row in own) == sum(kinds[name])]
        )
    return found


def steps_of(asked: TrainRequest, count: int) -> Steps:
    """The rows that `count` ranks have recorded, step by step."""
    return list(zip(*(rows(asked, f"steps-rank{number}") for number in range(count)), strict=True))


def rate(steps: Steps, *, alone: bool = False) -> float:
    """Samples per second; of a host `alone`, by its own compute time."""
    working = [row for own in steps for row in own if row["batch_size"]]
    return sum(row["batch_size"] for row in working) / (
        sum(row["compute_s"] for row in working) if alone else slowest_s(steps)
    )


def share_of_own(steps: Steps) -> float:
    """The throughput of these steps, relative to the sum of the ranks' own speeds in them.

    A rank's own speed is its samples by its compute time, without waiting and sums. Never above 1.
    """
    reached = sum(row["batch_size"] for own in steps for row in own) / slowest_s(steps)
    ranks = [[row for row in own if row["batch_size"]] for own in zip(*steps, strict=True)]
    return reached / sum(
        sum(row["batch_size"] for row in own) / sum(row["compute_s"] for row in own)
        for own in ranks
        if own
    )


def slowest_s(steps: Steps) -> float:
    """The total time of these steps, each by its slowest rank."""
    return sum(max(row["step_time_s"] for row in own) for own in steps)


def breakdown(steps: Steps, split: list[int], alone: list[float]) -> str:
    """The mean parts of a step's time."""
    own = [
        1e3 * statistics.mean(row["compute_s"] for row in rank) for rank in zip(*steps, strict=True)
    ]
    slowest = 1e3 * statistics.mean(max(row["compute_s"] for row in ranks) for ranks in steps)
    whole = 1e3 * slowest_s(steps) / len(steps)
    rest = [
        1e3 * (max(r["step_time_s"] for r in ranks) - max(r["compute_s"] for r in ranks))
        for ranks in steps
    ]
    listed = ", ".join(
        f"{one:.0f} ({1e3 * part / speed:.0f} alone)"
        for one, part, speed in zip(own, split, alone, strict=True)
    )
    return (
        f"a step, in ms: {whole:.0f}; each host computes {listed}; the slowest {slowest:.0f}, "
        f"sums {whole - slowest:.0f} (median {statistics.median(rest):.0f}, max {max(rest):.0f})"
    )


def spread(values: list[float]) -> str:
    low, _, high = (
        statistics.quantiles(values, n=4) if len(values) > 1 else (values[0], 0, values[0])
    )
    return f"{statistics.median(values):7.1f} samples/s ({low:.1f} to {high:.1f})"


def shown(share: tuple[float, float, float]) -> str:
    return f"{share[0]:.1%} ({share[1]:.1%} to {share[2]:.1%})"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rounds", type=int, nargs="?", default=10)
    parser.add_argument("--cores", type=float, nargs="+", default=[0.8, 0.4, 0.2])
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--backend", default="auto", choices=["auto", "horovod", "torch"])
    parser.add_argument("--channels", type=int, default=96, help="of the network")
    parser.add_argument("--passes", type=int, default=12, help="through its middle layer")
    parser.add_argument(
        "--split",
        type=int,
        nargs="+",
        help="measure this one instead of the final split of an adaptive training",
    )
    parser.add_argument(
        "--other", type=int, nargs="+", help="split to compare with; default: the even one"
    )
    parser.add_argument(
        "--epochs", type=int, default=20, help="of the training that finds the split"
    )
    parser.add_argument(
        "--roam", action="store_true", help="let hosts use all cores of this machine"
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if (reason := lab.why_not()) is not None:
        raise SystemExit(reason)
    backend = choose_backend(given.backend)
    job = {"backend": backend, "model": {"channels": given.channels, "passes": given.passes}}
    folder = (
        nullcontext(str(given.keep.absolute())) if given.keep else tempfile.TemporaryDirectory()
    )
    with folder as name, lab.running(cores=[FREELY] * len(given.cores), rate=given.rate) as made:
        print(
            f"{backend}, hosts of {given.cores} cores, links of {given.rate}, batch {BATCH}, "
            f"{given.channels} channels, {given.passes} passes, seed {given.seed}"
            f"{', roaming' if given.roam else ''}"
        )
        if not given.roam:
            pin(made, given.cores)
        if (split := given.split) is None:
            with held(made, given.cores):
                split = found_split(Path(name) / "first", made, job, given.epochs)
            print(f"split found, from {even(len(given.cores))}: {split}")
        other = given.other or even(len(given.cores))
        with held(made, given.cores):
            found = windows(
                Path(name) / "second", made, job, split, other, given.rounds, given.seed
            )
    alone = [kind for kind in sorted(found) if kind.startswith("alone")]
    rates = {
        kind: [rate(steps, alone=kind in alone) for steps in rounds]
        for kind, rounds in found.items()
    }
    ideal = [sum(speeds) for speeds in zip(*(rates[kind] for kind in alone), strict=True)]
    for kind in (*alone, "found", "other"):
        print(f"{kind:8} {spread(rates[kind])}")
    both = [[*one, *other] for one, other in zip(found["found"], found["again"], strict=True)]
    for kind, rounds in (("found", both), ("other", found["other"])):
        of_alone = median_between(
            [rate(steps) / whole for steps, whole in zip(rounds, ideal, strict=True)]
        )
        of_own = median_between([share_of_own(steps) for steps in rounds])
        met = "met" if min(of_alone[0], of_own[0]) >= BAR else "missed"
        print(
            f"{kind:8} {shown(of_alone)} of hosts alone, {shown(of_own)} of their own speed: {met} "
            f"(bar {BAR:.0%})"
        )
    noise = median_between(
        [two / one for one, two in zip(rates["found"], rates["again"], strict=True)]
    )
    print(f"again    {shown(noise)} of the first window")
    steps = [step for rounds in both for step in rounds]
    print(breakdown(steps, split, [statistics.median(rates[kind]) for kind in alone]))


if __name__ == "__main__":
    main()
