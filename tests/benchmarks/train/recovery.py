"""How fast training recovers from killed ranks.

    python tests/benchmarks/train/recovery.py [KILLS] [RANKS] [BACKEND ...] [--seed N] [--seeds N]
        [--epochs-per-kill E] [--between LOW HIGH] [--hosts Q ...]

For each library, trains on RANKS emulated devices (default 3) and kills random ranks by SIGKILL,
KILLS times (default 20), some seconds apart, the first rank as often as the others. Prints a line
after each recovery, so that an interrupted run has printed something. A kill takes about 6 s with
the default epochs, longer if steps are slower (Horovod). With `--hosts`, each rank runs on its own
host in a lab, reached by ssh and limited to that quota of cores from the first step on (`hosts`;
needs root), and the network is larger. A replacement loads torch within its quota, so kills should
be further apart (`--between`, seconds).

At the end it prints the seconds from a kill until two more steps are finished (the current step may
still finish by itself), the steps lost, and the longest pause between two steps when a rank came
back; for comparison, the longest pause in the second before each kill (the noise). Then the
accuracy on held-out rows beside that of undisturbed trainings with `--seeds` seeds (not with
`--hosts`), and each bar with its figure, met or missed. An accuracy is within seed noise if it is
above the one-sided 95 % prediction bound for one more seed (Student's t), or at most one held-out
row below the mean of the undisturbed trainings.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
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

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.extend(
    str(Path(__file__).parents[2] / "tasks" / "train" / room) for room in ("", "hosts", "rank")
)

import lab
from hosts import FREELY, held
from hosts import on_hosts as on_quota_hosts
from scipy.stats import t
from training_case import request

from trainwright.tasks import progress
from trainwright.tasks.train import train

SEEDS = 5
BATCH, EVERY = 60, 25
TRAIN_ROWS, HELD_OUT = 1438, 359
HOST_MODEL = {"channels": 64, "passes": 6}
MEDIAN_S, WORST_S = 5.0, 10.0


class Watch:
    """Watches the recorded steps and the processes of the ranks."""

    def __init__(self, folder: Path) -> None:
        self.journals = folder / "work" / "journal"
        self.pids: dict[int, int] = {}
        self.loaded: dict[int, bool] = {}
        self.groups: list[tuple[float, str]] = []
        self.seen: list[tuple[float, int]] = [(time.monotonic(), -1)]
        self.over = threading.Event()

    def hear(self, event: dict[str, Any]) -> None:
        if event["event"] == "rank":
            self.pids[event["rank"]], self.loaded[event["rank"]] = (
                event["pid"],
                event["state"] == "loaded",
            )
        elif event["event"] == "world":
            self.groups.append((time.monotonic(), event["reason"]))

    def follow(self) -> None:
        """Record the first finish of each step, and returns to an earlier step."""
        while not self.over.wait(0.004):
            newest = -1
            for path in self._segments():
                try:
                    whole = path.read_bytes().rpartition(b"\n")[0]
                    newest = (
                        max(newest, json.loads(whole.rpartition(b"\n")[2]).get("step", -1))
                        if whole
                        else newest
                    )
                except (OSError, ValueError):
                    continue  # it is being written at this moment
            if newest >= 0 and newest != self.seen[-1][1]:
                self.seen.append((time.monotonic(), newest))

    def _segments(self) -> list[Path]:
        try:
            return list(self.journals.glob("*.jsonl"))
        except OSError:  # the launcher removes the folder at this moment
            return []

    @property
    def step(self) -> int:
        return self.seen[-1][1]

    def pauses(self, begin: float, end: float) -> float:
        """The longest time between two steps that overlaps with this period."""
        times = [moment for moment, _ in self.seen]
        inside = [later - one for one, later in pairwise(times) if one <= end and later >= begin]
        return max(inside, default=0.0)


def disturbed(
    backend: str, epochs: int, given: argparse.Namespace, made: lab.Lab | None
) -> tuple[float, list[str]]:
    """The final accuracy, and a verdict for each bar."""
    ranks, kills, seed = given.ranks, given.kills, given.seed
    draw, recovered, lost, quiet = random.Random(seed), [], [], []
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        watch = Watch(folder)
        stack.enter_context(progress.listening(watch.hear))
        if made is None:
            asked = case(folder, backend, ranks, epochs, 1.0, seed)
        else:
            stack.enter_context(held(made, given.hosts))
            spec = {
                "backend": backend,
                "epochs": epochs,
                "seed": seed,
                "schedule": "cosine",
                "model": HOST_MODEL,
            }
            checkpoint = {"every_steps": EVERY, "keep_best": False}
            asked = on_quota_hosts(folder, made, shares(ranks), checkpoint=checkpoint, **spec)

        def kill_ranks() -> None:
            wait_for(lambda: watch.step >= 10, watch)
            for _ in range(kills):
                watch.over.wait(draw.uniform(*given.between))
                alive = sorted(number for number, there in watch.loaded.items() if there)
                if watch.over.is_set() or not alive:
                    return
                now, step = time.monotonic(), watch.step
                quiet.append(watch.pauses(now - 1.0, now))
                victim = draw.choice(alive)
                (pid,) = [watch.pids[victim]] if made is None else pids_on(made, victim)
                os.kill(pid, signal.SIGKILL)
                wait_for(
                    lambda step=step, now=now: watch.step >= step + 2 and watch.seen[-1][0] > now,
                    watch,
                )
                after = [one for moment, one in watch.seen if moment > now]
                recovered.append(
                    next(m for m, one in watch.seen if m > now and one >= step + 2) - now
                )
                lost.append(max(0, step + 1 - min(after)))
                print(
                    f"kill {len(lost)}: rank {victim} of {len(alive)} loaded at step {step}: "
                    f"{recovered[-1]:.2f} s, {lost[-1]} steps lost",
                    flush=True,
                )

        threads = [threading.Thread(target=watch.follow), threading.Thread(target=kill_ranks)]
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
            for moment, reason in watch.groups
            if "is back" in reason and "killed" not in reason
        ]
    on = f"; hosts of {given.hosts} cores" if made else ""
    print(
        f"\n{backend}, {ranks} ranks, {len(recovered)} kills, seed {seed}; "
        f"checkpoint every {EVERY} steps{on}"
    )
    print(f"kill to two more steps: {line(recovered)}; longest pause before kills: {line(quiet)}")
    print(f"steps lost: at most {max(lost, default=0)}")
    print(f"longest pause when a rank came back: {line(grown)}")
    samples = sum(device.samples for device in result.devices)
    print(
        f"accuracy {result.metrics['accuracy']:.4f}, loss {result.metrics['loss']:.4f}; "
        f"samples {samples}, of {epochs * TRAIN_ROWS}",
        flush=True,
    )
    few = len(recovered) < kills
    middle, worst = (
        (statistics.median(recovered), max(recovered)) if recovered else (math.inf, math.inf)
    )
    return result.metrics["accuracy"], [
        verdict(f"{len(recovered)} of {kills} kills survived, and the training finished", not few),
        verdict(
            f"trains again after {middle:.2f} s (median), bar {MEDIAN_S:g} s",
            middle <= MEDIAN_S,
        ),
        verdict(f"worst {worst:.2f} s, bar {WORST_S:g} s", worst <= WORST_S),
        verdict(
            f"at most {max(lost, default=0)} steps lost, bar {EVERY}", max(lost, default=0) <= EVERY
        ),
        verdict(
            f"each sample counted once: {samples} of {epochs * TRAIN_ROWS}",
            samples == epochs * TRAIN_ROWS,
        ),
        verdict(
            f"a rank's return stalls others for at most {max(grown, default=math.inf):.2f} s, "
            f"bar {WORST_S:g} s",
            max(grown, default=math.inf) <= WORST_S and statistics.median(grown) <= MEDIAN_S,
        ),
    ]


def verdict(what: str, met: bool) -> str:
    return f"{what}: {'met' if met else 'missed'}"


def seed_noise(accuracy: float, others: list[float]) -> str:
    """Whether an accuracy is within seed noise of undisturbed trainings."""
    mean, number = statistics.mean(others), len(others)
    allowed = max(
        t.ppf(0.95, number - 1) * statistics.stdev(others) * math.sqrt(1 + 1 / number), 1 / HELD_OUT
    )
    figures = (
        f"accuracy {accuracy:.4f}, undisturbed mean {mean:.4f} of {number} seeds, "
        f"allowed {allowed:.4f} less"
    )
    return verdict(figures, accuracy >= mean - allowed)


def shares(ranks: int) -> list[int]:
    return [BATCH // ranks + (BATCH % ranks if rank == 0 else 0) for rank in range(ranks)]


def pids_on(made: lab.Lab, number: int) -> list[int]:
    """The process ids of this rank on its host."""
    found = []
    for pid in made.hosts[number].pids():
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if (
                b"trainwright.tasks.train.worker.entry" in words
                and words[-2] == str(number).encode()
            ):
                found.append(pid)
    return found


def case(folder: Path, backend: str, ranks: int, epochs: int, speed: float, seed: int) -> Any:
    devices = [{"type": "emulated", "speed": speed}] * ranks
    asked = request(
        folder,
        shares(ranks),
        devices=devices,
        backend=backend,
        epochs=epochs,
        model={"norm": True},
        schedule="cosine",
        checkpoint={"every_steps": EVERY, "keep_best": False},
        seed=seed,
    )
    return asked


def line(values: list[float]) -> str:
    return (
        f"median {statistics.median(values):.2f} s, worst {max(values):.2f} s of {len(values)}"
        if values
        else "none"
    )


def wait_for(condition: Callable[[], bool], watch: Watch) -> None:
    while not condition() and not watch.over.is_set():
        time.sleep(0.004)


def undisturbed(epochs: int, seeds: list[int]) -> list[float]:
    found = []
    for seed in seeds:
        with tempfile.TemporaryDirectory() as name:
            found.append(train(case(Path(name), "torch", 1, epochs, 1e6, seed)).metrics)
    accuracies = [one["accuracy"] for one in found]
    print(
        f"\nundisturbed, seeds {seeds}: "
        f"accuracy {' '.join(f'{one:.4f}' for one in accuracies)}; loss "
        + " ".join(f"{one['loss']:.4f}" for one in found)
    )
    return accuracies


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kills", type=int, nargs="?", default=20)
    parser.add_argument("ranks", type=int, nargs="?", default=3)
    parser.add_argument(
        "backends",
        nargs="*",
        default=["torch", *(["horovod"] if importlib.util.find_spec("horovod") else [])],
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="of undisturbed trainings")
    parser.add_argument(
        "--epochs-per-kill", type=float, default=9, help="5 are enough for steps of 50 ms"
    )
    parser.add_argument(
        "--between",
        type=float,
        nargs=2,
        default=[2.0, 7.0],
        help="seconds from a recovery to the next kill",
    )
    parser.add_argument(
        "--hosts",
        type=float,
        nargs="+",
        metavar="Q",
        help="quota of cores of each rank's host",
    )
    given = parser.parse_args()
    if given.hosts and (len(given.hosts) != given.ranks or lab.why_not() is not None):
        parser.error(lab.why_not() or f"--hosts needs {given.ranks} quotas, one per rank")
    if given.seeds == 1:
        parser.error("--seeds: got 1; allowed: 0 or at least 2")
    epochs, ends = round(given.epochs_per_kill * given.kills), {}
    for backend in given.backends:
        with (
            lab.running(cores=[FREELY] * given.ranks)
            if given.hosts
            else contextlib.nullcontext() as made
        ):
            ends[backend] = disturbed(backend, epochs, given, made)
    others = (
        undisturbed(epochs, [given.seed + one for one in range(given.seeds)])
        if not given.hosts
        else []
    )
    for backend, (accuracy, verdicts) in ends.items():
        print()
        last = seed_noise(accuracy, others) if others else "accuracy: not compared"
        for one in [*verdicts, last]:
            print(f"{backend}: {one}")


if __name__ == "__main__":
    main()
