"""How training recovers from killed ranks, in each layout.

    python tests/benchmarks/train/layout_recovery.py [LAYOUT ...] [--kills 10] [--seed N]
        [--seeds 3] [--backend torch] [--between 3 8] [--at-once 1] [--stop-after S]
        [--epochs E] [--most-s 60]

For each layout, a job with this `train.layout` is planned on three emulated devices (speeds 2:1:1)
and trained; `pipeline` is two pipelines of two stages on four alike devices, each kill at a time
when all four train. Random ranks are killed by SIGKILL, some seconds apart, at any point of a step,
of an evaluation, or while a group forms; `--at-once 2` kills two each time. One rank at least is
left; if none were, the time would be that of loading a process. With `--stop-after`, they are
stopped by SIGSTOP instead, and the job's stall timeout is this many seconds. Printed for each kill:
the seconds until two steps are finished again (one may have been almost finished at the kill), and
the finished steps that were lost. A training that finishes no step for `--most-s` seconds counts as
hanging, and is stopped.

At the end, for each layout: median and worst of both; for `pipeline` also the median step of each
group of three ranks beside the simulated step of the best plan for these devices; and the accuracy
on held-out rows beside that of undisturbed trainings of the same plan with `--seeds` seeds, the
first of which is the same.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.extend(
    str(Path(__file__).parents[2] / "tasks" / "train" / room) for room in ("", "hosts", "rank")
)

import doors
from recovery import Watch, line, seed_noise, verdict, wait_for

from trainwright.tasks import progress
from trainwright.tasks.allocate.preview import plan_and_estimate
from trainwright.tasks.allocate.replan.next_layout import (
    LayoutPlanner,
    StagePlanner,
    layout_planner,
)
from trainwright.tasks.data import dataset
from trainwright.tasks.runs.artefacts.estimate import Estimate
from trainwright.tasks.runs.artefacts.training_result import Result
from trainwright.tasks.spec.job import Job
from trainwright.tasks.spec.pool import load_pool
from trainwright.tasks.train import TrainRequest, train
from trainwright.tasks.train.batch.sampling import shares
from trainwright.tasks.train.record.metrics import read_rows

LAYOUTS = ("data-parallel", "late-multiply", "sharded", "hybrid", "averaging", "pipeline")
SPEEDS = (2.0, 1.0, 1.0)
PIPELINES = {"stages": 2, "replicas": 2, "micro_batches": 4}
PIPELINE_SPEED = 0.5
LEAST_STEPS, LEAST_PACE = 6, 0.85
"""Of the steps of fewer ranks, the first two are left out, and their median needs so many."""
BATCH, EVERY, STEP_S = 120, 25, 0.04
TRAIN_ROWS = 1438
BAR_S = 10.0
MODEL = """
import torch


def build_model():
    return torch.nn.Sequential(
        torch.nn.Flatten(),
        torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Dropout(0.1),
        torch.nn.Linear(128, 96), torch.nn.ReLU(),
        torch.nn.Linear(96, 10),
    )
"""


@dataclass
class Outcome:
    """What the kills of one training cost."""

    recovered_s: list[float] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    accuracy: float = 0.0
    samples: int = 0
    paces: list[float] = field(default_factory=list)
    """of groups of fewer ranks: the planned seconds of a step by the measured ones"""


class StepWatch(Watch):
    """Also records with how many finished steps each group begins."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.begun: list[tuple[float, int]] = []
        self.members: list[int] | None = None
        """of the newest group; None: all"""

    def hear(self, event: dict[str, Any]) -> None:
        super().hear(event)
        if event["event"] == "world":
            self.members = event["ranks"]
        if event["event"] == "split":
            self.begun.append((time.monotonic(), event["step"]))

    def finished_since(self, moment: float) -> list[float]:
        """When steps were finished since then; a return to an earlier step is none."""
        seen = list(self.seen)
        pairs = pairwise(seen)
        return [at for (_, before), (at, step) in pairs if step > before and at > moment]

    def lost_since(self, moment: float, step: int) -> int:
        """How many of the steps that were finished then, or later, were lost."""
        newest, lost = step, 0
        changes = [(at, one, False) for at, one in list(self.seen)]
        changes += [(at, begun - 1, True) for at, begun in list(self.begun)]
        for at, last, is_begin in sorted(changes):
            if at <= moment:
                continue
            if is_begin:
                lost += max(0, newest - last)
                newest = last
            else:
                newest = max(newest, last)
        return lost


def request_of(
    folder: Path, layout: str, epochs: int, given: argparse.Namespace
) -> tuple[TrainRequest, Estimate]:
    """A job with this layout, as it is planned, and the estimate."""
    source = folder / "source"
    source.mkdir()
    (source / "net.py").write_text(MODEL)
    staged = layout == "pipeline"
    speeds = (PIPELINE_SPEED,) * 4 if staged else SPEEDS
    devices = [{"type": "emulated", "speed": speed} for speed in speeds]
    pool = {"name": "three", "hosts": [{"name": "here", "address": "localhost"}]}
    pool["hosts"][0]["devices"] = devices  # type: ignore[index]
    (folder / "pool.json").write_text(json.dumps(pool))
    job = Job.model_validate(
        {
            "name": "case",
            "pool": str(folder / "pool.json"),
            "data": {"uri": "builtin:digits"},
            "model": {"source": str(source / "net.py")},
            "devices": {"min_count": 4 if staged else 1},
            "objective": {"minimize": "time"},
            "train": {
                "layout": PIPELINES if staged else layout,
                "epochs": epochs,
                "global_batch_size": BATCH,
                "learning_rate": 0.02,
                "optimizer": {"name": "momentum"},
                "schedule": "cosine",
                "backend": given.backend,
                "adaptive_split": False,
                "checkpoint": {"every_steps": EVERY, "keep_best": False},
                "faults": {"stall_timeout": f"{given.stop_after:g}s"} if given.stop_after else {},
                "seed": given.seed,
            },
        }
    )
    settings = doors.settings()
    plan, estimate = plan_and_estimate(job, settings)
    if len(plan.devices) != len(speeds):
        raise SystemExit(f"{layout}: the plan has {len(plan.devices)} devices")
    job = job.model_copy(update={"devices": job.devices.model_copy(update={"min_count": 1})})
    asked = TrainRequest(
        job=job,
        plan=plan,
        learning_rate=0.02,
        schema=dataset.describe(job.data),
        source_folder=str(source),
        entry="net.py",
        run_uri=(folder / "run").as_uri(),
        work_folder=str(folder / "work"),
        settings=settings,
    )
    return asked, estimate


def disturbed(asked: TrainRequest, estimate: Estimate, given: argparse.Namespace) -> Outcome:
    """Train with kills."""
    what = asked.job, load_pool(asked.job.pool), estimate, asked.schema_
    planner, stages = layout_planner(*what), StagePlanner(*what)
    staged, everyone = asked.layout.has_stages, len(asked.plan.devices)
    draw, found, stop = random.Random(given.seed), Outcome(), threading.Event()
    watch = StepWatch(Path(asked.work_folder).parent)
    how = signal.SIGSTOP if given.stop_after else signal.SIGKILL

    def loaded() -> list[int]:
        return sorted(one for one, there in list(watch.loaded.items()) if there)

    def kill_ranks() -> None:
        wait_for(lambda: watch.step >= 10, watch)
        for number in range(given.kills):
            watch.over.wait(draw.uniform(*given.between))
            wait_for(lambda: len(loaded()) > given.at_once, watch)
            if staged:
                wait_for(lambda: len(watch.members or range(everyone)) == everyone, watch)
                watch.over.wait(0.5)
            alive = loaded()
            if watch.over.is_set():
                return
            victims = draw.sample(alive, given.at_once)
            now, step = time.monotonic(), watch.step
            for victim in victims:
                os.kill(watch.pids[victim], how)
            wait_for(
                lambda now=now: (
                    len(watch.finished_since(now)) >= 2 or time.monotonic() > now + given.most_s
                ),
                watch,
            )
            finished = watch.finished_since(now)
            if len(finished) < 2:
                if not watch.over.is_set():
                    print(f"kill {number + 1}: ranks {victims}: hangs", flush=True)
                    stop.set()
                return
            found.recovered_s.append(finished[1] - now)
            found.lost.append(watch.lost_since(now, step))
            print(
                f"kill {number + 1}: ranks {victims} of {len(alive)} loaded at step {step}: "
                f"{found.recovered_s[-1]:.2f} s, {found.lost[-1]} steps lost",
                flush=True,
            )

    threads = [threading.Thread(target=watch.follow), threading.Thread(target=kill_ranks)]
    with progress.listening(watch.hear):
        for thread in threads:
            thread.start()
        try:
            result = train(asked, stop=stop, layout_planner=planner if staged else None)
        finally:
            watch.over.set()
            for thread in threads:
                thread.join()
    found.accuracy = result.metrics["accuracy"]
    found.samples = sum(device.samples for device in result.devices)
    if staged:
        found.paces = paces(asked, result, planner, stages)
    return found


def paces(
    asked: TrainRequest, result: Result, planner: LayoutPlanner, stages: StagePlanner
) -> list[float]:
    """By group of fewer ranks: the best plan's simulated step, by the median of those measured."""
    seconds: dict[int, float] = {}
    for rank in range(len(asked.plan.devices)):
        rows = read_rows(asked.store(), f"steps-rank{rank}")
        seconds |= {row["step"]: row["step_time_s"] for row in rows}
    devices, layout, found = {one.id: one for one in asked.plan.devices}, asked.layout, []
    ends = [*(one.step for one in result.split_events[1:]), result.steps]
    for event, end in zip(result.split_events, ends, strict=True):
        layout = event.layout or layout
        steps = [seconds[step] for step in range(event.step + 2, end) if step in seconds]
        if len(layout.devices) == len(devices) or len(steps) < LEAST_STEPS:
            continue
        left = [one for one in devices.values() if one.id in layout.devices]
        best = planner(left, shares(BATCH, [1] * len(left)), 1, (), True, {}).layout
        assert best is not None
        planned_s = stages.times(best, left, {}).step_s
        measured_s = statistics.median(steps)
        print(
            f"steps {event.step} to {end}: {[len(one.stages) for one in layout.pipelines]} stages, "
            f"{1e3 * measured_s:.1f} ms; the best plan {1e3 * planned_s:.1f} ms",
            flush=True,
        )
        found.append(planned_s / measured_s)
    return found


def undisturbed(asked: TrainRequest, folder: Path, seeds: list[int]) -> list[float]:
    """Accuracies of the same plan on devices that are as fast as this machine."""
    devices = [one.model_copy(update={"speed": 1e6}) for one in asked.plan.devices]
    plan, found = asked.plan.model_copy(update={"devices": devices}), []
    for seed in seeds:
        spec = asked.job.train.model_copy(update={"seed": seed})
        work = folder / f"undisturbed-{seed}"
        changes = {
            "plan": plan,
            "job": asked.job.model_copy(update={"train": spec}),
            "run_uri": (work / "run").as_uri(),
            "work_folder": str(work / "work"),
        }
        found.append(train(asked.model_copy(update=changes)).metrics["accuracy"])
    return found


def report(layout: str, epochs: int, found: Outcome, others: list[float], kills: int) -> None:
    """Print the figures of a layout, and whether each bar is met."""
    survived = len(found.recovered_s)
    worst, most = max(found.recovered_s, default=BAR_S), max(found.lost, default=0)
    lost = f"median {statistics.median(found.lost):g}" if found.lost else "none"
    verdicts = [
        verdict(f"{survived} of {kills} kills survived", survived == kills),
        verdict(f"goes on after {line(found.recovered_s)}, bar {BAR_S:g} s", worst <= BAR_S),
        verdict(f"steps lost: {lost}, worst {most}, bar {EVERY}", most <= EVERY),
        verdict(
            f"each sample counted once: {found.samples} of {epochs * TRAIN_ROWS}",
            found.samples == epochs * TRAIN_ROWS,
        ),
    ]
    if found.paces:
        usual, least = statistics.median(found.paces), min(found.paces)
        verdicts.append(
            verdict(
                f"of the best remaining plan's speed: median {usual:.2f}, least "
                f"{least:.2f}, bar {LEAST_PACE:g}",
                least >= LEAST_PACE,
            )
        )
    if others:
        difference = found.accuracy - others[0]
        verdicts.append(f"accuracy of the same seed undisturbed: {difference:+.4f}")
    if len(others) > 1:
        verdicts.append(seed_noise(found.accuracy, others))
    for one in verdicts:
        print(f"{layout}: {one}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("layouts", nargs="*", metavar="LAYOUT", help=f"of {', '.join(LAYOUTS)}")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=3, help="of undisturbed trainings")
    parser.add_argument("--backend", default="torch", choices=["torch", "horovod"])
    parser.add_argument(
        "--between",
        type=float,
        nargs=2,
        default=[3.0, 8.0],
        help="seconds from a recovery to the next kill",
    )
    parser.add_argument("--epochs", type=int, help="default: by the kills and their distance")
    parser.add_argument("--at-once", type=int, default=1, help="ranks killed each time")
    parser.add_argument("--stop-after", type=float, metavar="S", help="SIGSTOP; stall timeout")
    parser.add_argument("--most-s", type=float, default=60.0, help="counts as hanging")
    given = parser.parse_args()
    layouts = given.layouts or list(LAYOUTS)
    if unknown := set(layouts) - set(LAYOUTS):
        parser.error(f"LAYOUT: got {min(unknown)}; allowed: {', '.join(LAYOUTS)}")
    cycle_s = statistics.mean(given.between) + 6.0  # and the time of loading
    needed = round(cycle_s * (given.kills + 1) / STEP_S * BATCH / TRAIN_ROWS)
    for layout in layouts:
        with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
            os.environ["TRAINWRIGHT_HOME"] = f"{name}/home"
            stack.callback(os.environ.pop, "TRAINWRIGHT_HOME")
            epochs = given.epochs or (needed // 2 if layout == "pipeline" else needed)
            asked, estimate = request_of(Path(name), layout, epochs, given)
            placed = asked.plan.layout
            print(f"\n{layout}: {placed.sync if placed else 'one device'}, {epochs} epochs")
            found = disturbed(asked, estimate, given)
            seeds = [given.seed + one for one in range(given.seeds)]
            report(layout, epochs, found, undisturbed(asked, Path(name), seeds), given.kills)


if __name__ == "__main__":
    main()
