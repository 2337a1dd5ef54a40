"""What checkpoints cost: time per step with one every 50 steps against none, on two ranks.

    python tests/benchmarks/train/checkpoint.py [--model small|medium|long|large] [--store s3|idle|file] [--rounds 5]
    [--steps 220] [--every 50]

A checkpoint takes CPU time that does not depend on the step, so there are several: `small` is a network of some kB, whose steps
take some ms; `medium` and `long` have 1 MB of parameters and go through their layers so often that a step takes some 30 and
100 ms; `large` has 100 MB of parameters and 200 MB of Adam's state.

The store is a real S3 server, which shares this machine's cores with both ranks and takes more CPU time for a checkpoint than
they do (`s3`); the same with the least priority, so that it has what the ranks leave (`idle`); or a folder (`file`). What they
differ by is the store's cost on a shared machine, not training's.

In each round, training without checkpoints runs twice and with them once, in random order. The time is wall time between steps,
pauses for checkpoints within; the last checkpoint, which training waits for in either case, is left out. The noise floor is by
how much the two without differ. The bar is 3 %. Beside it: the CPU time that the server took for a checkpoint.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[2] / "tasks" / "train"))

MODELS = {
    "small": {"width": 64, "passes": 1}, "medium": {"width": 256, "passes": 8}, "long": {"width": 256, "passes": 28},
    "large": {"width": 2560, "passes": 1},
}  # fmt: skip
MODEL = """
import torch


class Net(torch.nn.Module):
    def __init__(self, width, passes):
        super().__init__()
        self.first, self.last, self.passes = torch.nn.Linear(64, width), torch.nn.Linear(width, 10), passes
        self.between = torch.nn.Sequential(*(
            layer for _ in range(4) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())
        ))

    def forward(self, images):
        inner = torch.relu(self.first(images.flatten(1)))
        for _ in range(self.passes):
            inner = self.between(inner)
        return self.last(inner)


def build_model(width, passes):
    return Net(width, passes)
"""
BATCHES = [32, 32]
TRAIN_ROWS = 1438
WARM_UP_STEPS = 10
NEVER = 10**6


def step_s(name: str, model: dict[str, int], store: str, steps: int, every: int) -> float:
    """Seconds per step of one training, in processes of its own."""
    from training_case import request

    from trainwright.tasks import progress
    from trainwright.tasks.train import train

    seen: list[tuple[int, float]] = []

    def note(event: dict[str, Any]) -> None:
        if event["event"] == "train":
            seen.append((event["step"], time.perf_counter()))

    with tempfile.TemporaryDirectory() as folder:
        asked = request(
            Path(folder), BATCHES, devices=[{"type": "cpu"}] * len(BATCHES), model=model,
            epochs=max(1, round(steps * sum(BATCHES) / TRAIN_ROWS)), optimizer={"name": "adamw"},
            checkpoint={"every_steps": every, "keep_last": 1, "keep_best": False},
        )  # fmt: skip
        (Path(asked.source_folder) / "net.py").write_text(MODEL)
        progress.listen(note)
        try:
            train(asked if store == "file" else asked.model_copy(update={"run_uri": f"s3://benchmark/{name}"}))
        finally:
            progress._listeners.remove(note)
    (first, began), (last, ended) = next(one for one in seen if one[0] > WARM_UP_STEPS), seen[-1]
    return (ended - began) / (last - first)


def stand_back(server: psutil.Process) -> None:
    """From now on its threads, and those that they start, have what others leave of the cores."""
    for thread in server.threads():
        os.setpriority(os.PRIO_PROCESS, thread.id, 19)
    session = Path(f"/proc/{server.pid}/autogroup")
    if session.exists():  # where the kernel shares the cores among sessions first
        session.write_text("19")


def main() -> None:
    """Measure, and print a line for each model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=list(MODELS), action="append")
    parser.add_argument("--store", choices=["s3", "idle", "file"], default="s3")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=220)
    parser.add_argument("--every", type=int, default=50)
    asked = parser.parse_args()
    from trainwright.infra.s3 import s3_service, start_s3, stop_s3

    with tempfile.TemporaryDirectory() as home:
        os.environ["TRAINWRIGHT_HOME"] = home
        start_s3(Path(home))
        server = psutil.Process(s3_service(Path(home)).pid())
        if asked.store == "idle":
            stand_back(server)
        try:
            for model in asked.model or MODELS:
                found: dict[str, list[float]] = {"without": [], "again": [], "with": []}
                served: dict[str, list[float]] = {way: [] for way in found}
                for number in range(asked.rounds):
                    for way in random.sample(sorted(found), len(found)):
                        every = asked.every if way == "with" else NEVER
                        name = f"{model}-{number}-{way}"
                        before = sum(server.cpu_times()[:2])
                        found[way].append(step_s(name, MODELS[model], asked.store, asked.steps, every))
                        served[way].append(sum(server.cpu_times()[:2]) - before)
                taken_s = statistics.mean(served["with"]) - statistics.mean(served["without"] + served["again"])
                report(f"{model}, {asked.store}", asked.every, found, taken_s / (asked.steps / asked.every))
        finally:
            stop_s3(Path(home))


def report(model: str, every: int, found: dict[str, list[float]], server_s: float) -> None:
    """The cost, by the median over rounds, and the noise floor."""
    rounds = list(zip(found["without"], found["again"], found["with"], strict=True))
    cost = statistics.median(2 * with_ / (one + other) - 1 for one, other, with_ in rounds)
    floor = statistics.median(abs(one - other) / ((one + other) / 2) for one, other, _ in rounds)
    without = statistics.median([*found["without"], *found["again"]])
    print(
        f"{model}: {1e3 * without:.1f} ms a step; a checkpoint every {every} steps costs {cost:+.1%} (bar 3 %); "
        f"noise floor {floor:.1%} over {len(rounds)} rounds; the server's own {1e3 * server_s:.0f} ms of CPU a checkpoint",
        flush=True,
    )


if __name__ == "__main__":
    main()
