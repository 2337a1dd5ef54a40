"""How training bears kills: `python tests/benchmarks/train/recovery.py [KILLS] [RANKS] [BACKEND ...] [--seed N] [--seeds N]
[--epochs-per-kill E]`.

For each library, a training on RANKS emulated devices (default 3) of which random ranks are killed by SIGKILL, KILLS times
(default 20), some seconds apart, the first rank as often as the others. Each kill has its line when training goes on, so that a
run which is cut short has said something; it takes about 6 s a kill with the default epochs, longer where steps are slower
(Horovod). At the end: seconds from a kill until two steps more are finished than before (the step at hand may still end by
itself), steps lost, the longest pause between two steps when a rank came back; beside it the longest pause in the second before
each kill (the noise). Then the accuracy on held-out rows beside that of undisturbed trainings with `--seeds` seeds.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tasks" / "train"))

from training_case import request

from trainwright.tasks import progress
from trainwright.tasks.train import train

SEEDS = 5
QUIET_S = (2.0, 7.0)
"""Between training going on and the next kill."""


class Watch:
    """Sees steps as the ranks note them, and the ranks' processes come and go."""

    def __init__(self, folder: Path) -> None:
        self.journals = folder / "work" / "journal"
        self.pids: dict[int, int] = {}
        self.worlds: list[tuple[float, str]] = []
        self.seen: list[tuple[float, int]] = [(time.monotonic(), -1)]
        self.over = threading.Event()

    def hear(self, event: dict[str, Any]) -> None:
        if event["event"] == "rank":
            self.pids[event["rank"]] = event["pid"] if event["state"] == "loaded" else 0
        elif event["event"] == "world":
            self.worlds.append((time.monotonic(), event["reason"]))

    def follow(self) -> None:
        """Note when a step that nobody had finished yet is there, and when steps begin again at an earlier one."""
        while not self.over.wait(0.004):
            newest = -1
            for path in self.journals.glob("*.jsonl"):
                try:
                    whole = path.read_bytes().rpartition(b"\n")[0]
                    newest = max(newest, json.loads(whole.rpartition(b"\n")[2]).get("step", -1)) if whole else newest
                except (OSError, ValueError):
                    continue  # written to at this moment
            if newest >= 0 and newest != self.seen[-1][1]:
                self.seen.append((time.monotonic(), newest))

    @property
    def step(self) -> int:
        return self.seen[-1][1]

    def pauses(self, begin: float, end: float) -> float:
        """The longest time between two steps that lie, in part, between two moments."""
        times = [moment for moment, _ in self.seen]
        inside = [later - one for one, later in pairwise(times) if one <= end and later >= begin]
        return max(inside, default=0.0)


def disturbed(backend: str, ranks: int, kills: int, epochs: int, seed: int) -> None:
    draw, recovered, lost, quiet = random.Random(seed), [], [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        watch = Watch(folder)
        progress._listeners[:] = [watch.hear]
        asked = case(folder, backend, ranks, epochs, 1.0, seed)

        def torment() -> None:
            wait_for(lambda: watch.step >= 10, watch)
            for _ in range(kills):
                pause_s = draw.uniform(*QUIET_S)
                watch.over.wait(pause_s)
                alive = [number for number, pid in watch.pids.items() if pid]
                if watch.over.is_set() or not alive:
                    return
                now, step = time.monotonic(), watch.step
                quiet.append(watch.pauses(now - 1.0, now))
                victim = draw.choice(alive)
                os.kill(watch.pids[victim], signal.SIGKILL)
                wait_for(lambda step=step, now=now: watch.step >= step + 2 and watch.seen[-1][0] > now, watch)
                after = [one for moment, one in watch.seen if moment > now]
                recovered.append(next(m for m, one in watch.seen if m > now and one >= step + 2) - now)
                lost.append(max(0, step + 1 - min(after)))
                print(
                    f"kill {len(lost)}: rank {victim} of {len(alive)} loaded at step {step}: {recovered[-1]:.2f} s, "
                    f"{lost[-1]} steps lost",
                    flush=True,
                )

        threads = [threading.Thread(target=watch.follow), threading.Thread(target=torment)]
        for thread in threads:
            thread.start()
        try:
            result = train(asked)
        finally:
            watch.over.set()
            for thread in threads:
                thread.join()
        grown = [
            watch.pauses(moment - 0.05, moment + 0.5)
            for moment, reason in watch.worlds
            if "is back" in reason and "killed" not in reason
        ]
    print(f"\n{backend}, {ranks} ranks, {len(recovered)} kills, seed {seed}; checkpoint every 25 steps")
    print(f"kill to two steps more: {line(recovered)}; longest pause before kills: {line(quiet)}")
    print(f"steps lost: at most {max(lost, default=0)}")
    print(f"longest pause as a rank came back: {line(grown)}")
    samples = sum(device.samples for device in result.devices)
    print(
        f"accuracy {result.metrics['accuracy']:.4f}, loss {result.metrics['loss']:.4f}; "
        f"samples {samples}, of {epochs * 1438}",
        flush=True,
    )


def case(folder: Path, backend: str, ranks: int, epochs: int, speed: float, seed: int) -> Any:
    batches = [60 // ranks + (60 % ranks if rank == 0 else 0) for rank in range(ranks)]
    devices = [{"type": "emulated", "speed": speed}] * ranks
    asked = request(
        folder, batches, devices=devices, backend=backend, epochs=epochs, model={"norm": True}, schedule="cosine",
        checkpoint={"every_steps": 25, "keep_best": False}, seed=seed,
    )  # fmt: skip
    return asked


def line(values: list[float]) -> str:
    return f"median {statistics.median(values):.2f} s, worst {max(values):.2f} s of {len(values)}" if values else "none"


def wait_for(condition: Callable[[], bool], watch: Watch) -> None:
    while not condition() and not watch.over.is_set():
        time.sleep(0.004)


def undisturbed(epochs: int, seeds: list[int]) -> None:
    progress._listeners[:] = [lambda event: None]
    found = []
    for seed in seeds:
        with tempfile.TemporaryDirectory() as name:
            found.append(train(case(Path(name), "torch", 1, epochs, 1e6, seed)).metrics)
    accuracies = [one["accuracy"] for one in found]
    print(
        f"\nundisturbed, seeds {seeds}: accuracy {' '.join(f'{one:.4f}' for one in accuracies)}; loss "
        + " ".join(f"{one['loss']:.4f}" for one in found)
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kills", type=int, nargs="?", default=20)
    parser.add_argument("ranks", type=int, nargs="?", default=3)
    parser.add_argument(
        "backends", nargs="*", default=["torch", *(["horovod"] if importlib.util.find_spec("horovod") else [])]
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="of undisturbed trainings")
    parser.add_argument("--epochs-per-kill", type=float, default=9, help="5 are enough for steps of 50 ms")
    given = parser.parse_args()
    epochs = round(given.epochs_per_kill * given.kills)
    for backend in given.backends:
        disturbed(backend, given.ranks, given.kills, epochs, given.seed)
    if given.seeds:
        undisturbed(epochs, [given.seed + one for one in range(given.seeds)])
