"""The cost of a checkpoint relative to 50 steps: steps with and without one, in one training on two
ranks.

    python tests/benchmarks/train/checkpoint.py [--model small|medium|long|wide|large]
        [--store s3|idle|file] [--apart] [--checkpoints 40] [--window 5] [--every 50]
        [--backend torch|horovod]

A checkpoint's CPU time does not depend on the step time, so there are several models. `small` has
a few kB of parameters and steps of a few ms. `medium` and `long` have 1 MB of parameters, and pass
through their layers so often that a step takes about 30 and 100 ms. `wide` has 17 MB of parameters,
50 MB with Adam's state, and steps of about 100 ms; `large` 100 and 300 MB.

The store is a real S3 server, which shares this machine's cores with both ranks and needs more CPU
time for a checkpoint than they do (`s3`); the same server with the lowest priority, so that it only
uses idle cores (`idle`); or a folder (`file`). The differences between these are the cost of the
store on a shared machine, not of training. With `--apart`, the server has one core for itself, and
the training (one rank and its launcher) has another. This shows the remaining cost if the store has
its own machine: copying, hashing and sending, all on the rank's core. It does not show ranks that
wait for each other, nor a network, and excludes the server's CPU time.

Each cycle of four windows (5 steps each; 50 for `small`) begins with a checkpoint, which is written
during the first two windows. These are compared with the mean of the two windows before and the two
after them, in which nothing is written: neighbours are the best reference on a machine whose speed
drifts, and short windows contain little of that drift. If a checkpoint took longer than its two
windows, this is printed and there is no verdict.

The difference is given relative to 50 steps, twice: by wall time, including the pauses for the
checkpoint; and by CPU time of ranks, launcher and server together, which does not show waiting but
hardly depends on the machine's other load. The noise is the same figures for a second training
without checkpoints. Printed: the median over the checkpoints with its 95 % confidence interval (by
order statistics; for fewer than six, minimum and maximum), and the quartiles. The bar is 3 %: it is
met or missed only if the whole interval is on one side.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from pace import median_between

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.extend(
    str(Path(__file__).parents[2] / "tasks" / "train" / room) for room in ("", "hosts", "rank")
)

MODELS = {
    "small": {"width": 64, "passes": 1},
    "medium": {"width": 256, "passes": 8},
    "long": {"width": 256, "passes": 28},
    "wide": {"width": 1024, "passes": 6},
    "large": {"width": 2560, "passes": 1},
}
MODEL = """
import torch


class Net(torch.nn.Module):
    def __init__(self, width, passes):
        super().__init__()
        self.first, self.last = torch.nn.Linear(64, width), torch.nn.Linear(width, 10)
        self.passes = passes
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
"""The batch of each rank; with `--apart`, only the first."""
VALIDATED = 0.01
"""The share of rows for validation: more would make the end of an epoch dominate the figures."""
TRAIN_ROWS = 1779
WINDOWS, WRITTEN = 4, 2
NEVER = 10**6
BAR = 0.03
STEPS = {"small": 50}
"""Steps per window; for the other models, `--window`."""
LOOK_S = 0.005


class Watch:
    """Records when checkpoints are stored, and the CPU time of ranks, launcher and `others`.

    The launcher is this process; the CPU time of the thread that reads the clocks is excluded.
    """

    def __init__(self, others: list[int]) -> None:
        self.stored: dict[int, float] = {}
        self._clocks = [time.CLOCK_PROCESS_CPUTIME_ID, *map(_clock_of, others)]
        self._seen: list[tuple[float, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def hear(self, event: dict[str, Any]) -> None:
        if event["event"] == "checkpoint":
            self.stored[event["step"]] = time.time()
        elif event["event"] == "rank" and event["state"] == "loaded":
            self._clocks.append(_clock_of(event["pid"]))

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            try:
                used = sum(map(time.clock_gettime, self._clocks)) - time.thread_time()
                self._seen.append((time.time(), used))
            except OSError:  # a rank has ended
                return

    def cpu_s(self, moments: list[float]) -> list[float]:
        """CPU time until each of these times. Raises RuntimeError if a rank ended earlier."""
        times, cpu = zip(*self._seen, strict=True)
        if moments[-1] > times[-1] + 1.0:
            raise RuntimeError(
                "a rank ended during the measurement, so its CPU time is not known to the end"
            )
        return [float(one) for one in np.interp(moments, times, cpu)]


def _clock_of(pid: int) -> int:
    """The id of a process's CPU-time clock (clock_getcpuclockid(3))."""
    return (~pid << 3) | 2


def windows_s(
    name: str,
    model: dict[str, int],
    asked_for: argparse.Namespace,
    steps: int,
    others: list[int],
    *,
    with_: bool,
) -> list[tuple[float, float]]:
    """Wall and CPU time of each window of `steps` steps in one training.

    With `with_`, each fourth window begins with a checkpoint.
    """
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from training_case import NO_SPARE, request

    from trainwright.tasks import progress
    from trainwright.tasks.train import train

    batches = BATCHES[:1] if asked_for.apart else BATCHES
    windows, cycle = WINDOWS * (asked_for.checkpoints + 2), WINDOWS * steps
    with (
        tempfile.TemporaryDirectory() as folder,
        Watch(others) as watch,
        progress.listening(watch.hear),
    ):
        asked = request(
            Path(folder),
            batches,
            devices=[{"type": "cpu"}] * len(batches),
            model=model,
            validation_fraction=VALIDATED,
            epochs=math.ceil(windows * steps * sum(batches) / TRAIN_ROWS),
            optimizer={"name": "adamw"},
            backend=asked_for.backend,
            checkpoint={
                "every_steps": cycle if with_ else NEVER,
                "keep_last": 1,
                "keep_best": False,
            },
            **NO_SPARE,
        )
        (Path(asked.source_folder) / "net.py").write_text(MODEL)
        train(
            asked
            if asked_for.store == "file"
            else asked.model_copy(update={"run_uri": f"s3://benchmark/{name}"})
        )
        ended = {
            event.step: event.wall_time
            for path in sorted((Path(asked.work_folder) / "events").glob("*"))
            for event in EventFileLoader(str(path)).Load()
            if any(value.tag == "loss/train" for value in event.summary.value)
        }
    written = (
        [step for step in range(cycle, windows * steps, cycle) if step + WRITTEN * steps in ended]
        if with_
        else []
    )
    late = [
        step for step in written if watch.stored.get(step, math.inf) > ended[step + WRITTEN * steps]
    ]
    if late:
        print(
            f"{name}: of {len(written)} checkpoints {len(late)} were not in the store "
            f"{WRITTEN * steps} steps later"
        )
    asked_for.late += len(late)
    borders = [
        ended[number * steps]
        for number in range(WINDOWS - WRITTEN, windows + 1)
        if number * steps in ended
    ]
    pairs = itertools.pairwise(zip(borders, watch.cpu_s(borders), strict=True))
    return [(after[0] - before[0], after[1] - before[1]) for before, after in pairs]


def stand_back(server: psutil.Process) -> None:
    """Give the server's threads, and those they start, the lowest priority."""
    for thread in server.threads():
        os.setpriority(os.PRIO_PROCESS, thread.id, 19)
    session = Path(f"/proc/{server.pid}/autogroup")
    if session.exists():  # if the kernel shares the cores among sessions first
        session.write_text("19")


def set_apart(server: psutil.Process) -> None:
    """Pin the server to the last core, and this process and its children to the first."""
    first, *_, last = sorted(os.sched_getaffinity(0))
    for thread in server.threads():
        os.sched_setaffinity(thread.id, {last})  # threads that they start inherit it
    os.sched_setaffinity(0, {first})


def costs_s(windows: list[float]) -> list[float]:
    """The cost of each checkpoint. The first two windows precede the first checkpoint."""
    return [
        windows[at] + windows[at + 1] - sum(windows[at - 2 : at] + windows[at + 2 : at + 4]) / 2
        for at in range(2, len(windows) - 3, WINDOWS)
    ]


def report(
    name: str,
    asked: argparse.Namespace,
    steps: int,
    found: dict[bool, list[tuple[float, float]]],
    server_s: float,
) -> None:
    """Print the cost of a checkpoint, in wall time and in CPU time."""
    for kind, of in enumerate(("time", "CPU time")):
        seconds = {with_: [window[kind] for window in found[with_]] for with_ in (True, False)}
        step_s = statistics.median(seconds[False]) / steps
        costs, noise = (
            [one / (asked.every * step_s) for one in costs_s(seconds[with_])]
            for with_ in (True, False)
        )
        (cost, low, high), (middle, least, most) = median_between(costs), median_between(noise)
        print(
            f"{name}: {1e3 * step_s:.1f} ms of {of} a step; a checkpoint every {asked.every} steps "
            f"costs {cost:+.1%} ({low:+.1%} to {high:+.1%}; bar 3 %: "
            f"{verdict(low, high, asked.late)}), quartiles {quartiles(costs)}, mean "
            f"{statistics.mean(costs):+.1%}; {1e3 * cost * asked.every * step_s:.0f} ms each; "
            f"without: {middle:+.1%} ({least:+.1%} to {most:+.1%}), quartiles {quartiles(noise)}; "
            f"{len(costs)} checkpoints",
            flush=True,
        )
    if server_s:
        print(f"{name}: the server used {1e3 * server_s:.0f} ms of CPU time per checkpoint")


def verdict(low: float, high: float, late: int) -> str:
    """Whether the bar is met, by the confidence interval; not shown if any checkpoint was late."""
    return "not shown" if late else "met" if high <= BAR else "missed" if low > BAR else "not shown"


def quartiles(values: list[float]) -> str:
    """The first and the third quartile."""
    first, _, third = statistics.quantiles(values, n=4)
    return f"{first:+.1%}, {third:+.1%}"


def main() -> None:
    """Measure, and print a line for each model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=list(MODELS), action="append")
    parser.add_argument("--store", choices=["s3", "idle", "file"], default="s3")
    parser.add_argument(
        "--apart", action="store_true", help="the server and one rank, each on its own core"
    )
    parser.add_argument("--backend", choices=["torch", "horovod"], default="torch")
    parser.add_argument("--checkpoints", type=int, default=40)
    parser.add_argument("--window", type=int, default=5, help="steps")
    parser.add_argument("--every", type=int, default=50)
    asked = parser.parse_args()
    if asked.apart and (asked.store != "s3" or len(os.sched_getaffinity(0)) < 2):
        parser.error("--apart needs a server (--store s3) and two cores")
    from trainwright.infra.s3_server import s3_service, start_s3, stop_s3

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is stopped
    with tempfile.TemporaryDirectory() as home:
        os.environ["TRAINWRIGHT_HOME"] = home
        server = None
        try:
            if asked.store != "file":
                start_s3(Path(home))
                server = psutil.Process(s3_service(Path(home)).pid())
            if server is not None and asked.store == "idle":
                stand_back(server)
            if server is not None and asked.apart:
                set_apart(server)
            for model in asked.model or MODELS:
                before = sum(server.cpu_times()[:2]) if server else 0.0
                steps = STEPS.get(model, asked.window)
                counted = [server.pid] if server is not None and not asked.apart else []
                found, asked.late = {}, 0
                for with_ in random.sample([True, False], 2):
                    found[with_] = windows_s(
                        f"{model}-{with_}", MODELS[model], asked, steps, counted, with_=with_
                    )
                served = sum(server.cpu_times()[:2]) - before if server else 0.0
                report(
                    f"{model}, {asked.store}{' apart' if asked.apart else ''}",
                    asked,
                    steps,
                    found,
                    served / (asked.checkpoints + 2),
                )
        finally:
            stop_s3(Path(home))  # also if it is still starting


if __name__ == "__main__":
    main()
