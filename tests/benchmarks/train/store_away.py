"""The cost of a store outage of a minute during training.

    python tests/benchmarks/train/store_away.py [--way killed|stopped] [--away 60] [--every 50]
        [--target accuracy|loss]

Two real ranks train on the digits, with emulated devices that take 40 ms per step, and store their
checkpoints on a real S3 server. The server is unreachable for `--away` seconds: `killed` by SIGKILL
(it refuses connections), then restarted on the same data; or `stopped` by SIGSTOP (it hangs), then
continued. Before the outage, training runs as long undisturbed. The number of steps and the longest
pause between two steps are compared between both periods; the difference between the halves of the
undisturbed period is the noise. Times are those at which the first rank recorded a step. With
`--target loss`, almost every epoch is the best so far, and its checkpoint is replaced only by that
of a better one.

No step is lost if the stored metrics have each rank's row of every step exactly once, with the same
loss as in the undisturbed training. A checkpoint has arrived once the launcher reports it as
stored. Of those begun during the outage, the newest 20 and the best are kept. At the end, metrics
and the last checkpoint are compared with those of the undisturbed training, bit by bit.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.extend(
    str(Path(__file__).parents[2] / "tasks" / "train" / room) for room in ("", "hosts", "rank")
)

from training_case import NO_SPARE, ROWS, SLOW, request

from trainwright.infra.background_process import stop
from trainwright.infra.s3_server import s3_service, start_s3, stop_s3
from trainwright.tasks import progress
from trainwright.tasks.storage.objects import ObjectStore
from trainwright.tasks.train import TrainRequest, train
from trainwright.tasks.train.checkpoint import files
from trainwright.tasks.train.record.metrics import read_rows

SPLIT, STEP_S = [40, 20], 0.045
BEGIN_S, END_S = 5.0, 35.0
"""Training time before the compared periods, and after the store is back."""
KEEP = 20
"""More checkpoints than become due before the uploader retries (15 s)."""


def killed(home: Path) -> Callable[[], object]:
    stop([s3_service(home)], grace_s=0)
    return lambda: start_s3(home)


def stopped(home: Path) -> Callable[[], object]:
    processes = s3_service(home).processes()
    for process in processes:
        process.suspend()
    return lambda: [process.resume() for process in processes]


WAYS = {"killed": killed, "stopped": stopped}


@dataclass
class Outage:
    """Stops the store, restarts it, records what arrives. Times are in seconds since 1970."""

    home: Path
    way: Callable[[Path], Callable[[], object]]
    away_s: float
    left: float = 0.0
    called: float = 0.0
    """when the restart of the server began"""
    back: float = 0.0
    """when the server answered again"""
    arrived: dict[int, float] = field(default_factory=dict)
    skipped: int = 0

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run)
        self._over = threading.Event()

    def hear(self, event: dict[str, Any]) -> None:
        if event["event"] == "train" and self._thread.ident is None:
            self._thread.start()
        elif event["event"] == "checkpoint":
            self.arrived[event["step"]] = time.time()
        elif event["event"] == "notice":
            self.skipped += "is skipped" in event["message"]

    def _run(self) -> None:
        self._over.wait(BEGIN_S + self.away_s)
        bring_back = self.way(self.home)
        self.left = time.time()
        try:
            self._over.wait(self.away_s)
        finally:
            self.called = time.time()
            bring_back()
            self.back = time.time()

    @contextmanager
    def heard(self) -> Any:
        with progress.listening(self.hear):
            try:
                yield
            finally:
                self._over.set()
                if self._thread.ident is not None:
                    self._thread.join()


def asked_for(
    folder: Path, given: argparse.Namespace, speeds: list[dict[str, Any]]
) -> TrainRequest:
    steps = (BEGIN_S + 2 * given.away + END_S) / STEP_S
    return request(
        folder,
        SPLIT,
        devices=speeds,
        epochs=round(steps * sum(SPLIT) / ROWS),
        model={"norm": True},
        schedule="cosine",
        checkpoint={"every_steps": given.every, "keep_last": KEEP},
        target={"metric": given.target, "value": 0.99},
        **NO_SPARE,
    )


def ended(asked: TrainRequest) -> dict[int, float]:
    """The times at which the first rank had recorded each step."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    return {
        event.step: event.wall_time
        for path in sorted((Path(asked.work_folder) / "events").glob("*"))
        for event in EventFileLoader(str(path)).Load()
        if any(value.tag == "loss/train" for value in event.summary.value)
    }


def window(moments: dict[int, float], begin: float, seconds: float) -> tuple[int, float]:
    """The number of steps in a window, and the longest pause that overlaps with it."""
    times = sorted(moments.values())
    pauses = [
        after - one for one, after in pairwise(times) if one <= begin + seconds and after >= begin
    ]
    return sum(begin < one <= begin + seconds for one in times), max(pauses)


def rows_of(store: ObjectStore) -> list[list[tuple[int, float]]]:
    return [
        [(row["step"], row["loss"]) for row in read_rows(store, f"steps-rank{rank}")]
        for rank in range(len(SPLIT))
    ]


def end_of(store: ObjectStore) -> tuple[int, bytes]:
    """Step and model of the newest checkpoint."""
    newest = files.list_states(store)[-1]
    return newest.step, files.whole_model(store, newest)


def report(
    way: str, asked: TrainRequest, result: Any, outage: Outage, undisturbed: tuple[ObjectStore, Any]
) -> None:
    """Print the results for one kind of outage."""
    store, (expected, wanted) = asked.store(), undisturbed
    moments, away_s = ended(asked), outage.away_s
    if outage.back > max(moments.values()):
        raise SystemExit(f"{way}: training ended before the store was back; use more --away")
    before, floor = window(moments, outage.left - away_s, away_s)
    meanwhile, pause = window(moments, outage.left, away_s)
    _, afterwards = window(moments, outage.called, END_S)
    halves = [window(moments, outage.left - one * away_s / 2, away_s / 2)[0] for one in (2, 1)]
    print(
        f"{way}: {meanwhile} steps in {away_s:g} s without the store, {before} in {away_s:g} s "
        f"before: {meanwhile / before:.3f}, noise {abs(halves[1] / halves[0] - 1):.3f}; longest "
        f"pause {1e3 * pause:.0f} ms, {1e3 * floor:.0f} ms before, {1e3 * afterwards:.0f} ms "
        "afterwards"
    )
    begun = [step for step, moment in moments.items() if outage.left < moment <= outage.called]
    due = [step for step in begun if step % asked.job.train.checkpoint.every_steps == 0]
    arrived = {
        step: at - outage.back
        for step, at in outage.arrived.items()
        if step in begun and at > outage.called
    }
    first, last = (f"{one(arrived.values(), default=math.nan):.1f}" for one in (min, max))
    print(
        f"{way}: {len(due)} checkpoints due meanwhile and those of best epochs, {outage.skipped} "
        f"skipped; {len(arrived)} arrived {first} to {last} s after the store answered again: "
        f"steps {sorted(arrived)}"
    )
    rows, rows_wanted = rows_of(store), rows_of(expected)
    steps = [Counter(step for step, _ in own) for own in rows]
    lost = sum(count[step] == 0 for count in steps for step in range(result.steps))
    twice = sum(count[step] > 1 for count in steps for step in count)
    figures = ", ".join(f"{name} {value!r}" for name, value in sorted(result.metrics.items()))
    print(f"{way}: {result.steps} steps; {figures}")
    bars = {
        f"{lost} steps lost, {twice} twice, of {result.steps} on {len(SPLIT)} ranks (bar 0)": lost
        == twice
        == 0,
        "each step's loss on each rank equals the undisturbed training's": rows == rows_wanted,
        "metrics and last checkpoint equal the undisturbed training's": result.metrics
        == wanted.metrics
        and end_of(store) == end_of(expected),
        "the newest checkpoint that was due meanwhile has arrived": bool(due)
        and due[-1] in arrived,
        "nothing left to upload": not any(
            path
            for place in ("staging", "spill")
            for path in (Path(asked.work_folder) / place).glob("*/*")
        ),
    }
    for what, met in bars.items():
        print(f"{way}: {what}: {'met' if met else 'missed'}", flush=True)


def main() -> None:
    """Measure, and print the results for each kind of outage."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=list(WAYS), action="append")
    parser.add_argument("--away", type=float, default=60.0, help="seconds")
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument(
        "--target", choices=["accuracy", "loss"], default="accuracy", help="decides the best epoch"
    )
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is stopped
    with tempfile.TemporaryDirectory() as name:
        home = Path(name) / "home"
        os.environ["TRAINWRIGHT_HOME"] = str(home)
        fast = asked_for(
            Path(name) / "undisturbed", given, [{"type": "emulated", "speed": 1e6}] * len(SPLIT)
        )
        undisturbed = fast.store(), train(fast)
        try:
            start_s3(home)
            for way in given.way or WAYS:
                asked = asked_for(Path(name) / way, given, SLOW).model_copy(
                    update={"run_uri": f"s3://benchmark/{way}"}
                )
                outage = Outage(home, WAYS[way], given.away)
                with outage.heard():
                    result = train(asked)
                report(way, asked, result, outage, undisturbed)
        finally:
            stop_s3(home)  # also if it is still starting


if __name__ == "__main__":
    main()
