"""Pipelines of emulated devices against one device, and their predicted steps.

    python tests/benchmarks/train/pipelines.py [--cases two:8 four:8 four:32 unlike:8 unlike:32]
        [--schedules gpipe 1f1b zero-bubble] [--ideal 0.5] [--batch 64] [--steps 6] [--blocks 3]

Real ranks on this machine train a chain of like blocks as a pipeline, and as one process on a
device of the first one's speed. They sleep by action, so that computing is emulated and messages
are real; speeds are such that a step takes `--ideal` seconds if all devices compute all the time.
Trainings take turns in each block. Printed are the median step and its range, how many times as
fast as one device it is, and the predicted step beside it. For unlike devices: the step's part of
the best division by brute force (simulated), and of Σ speeds × (1 − ideal bubble).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.extend(
    str(Path(__file__).parents[2] / "tasks" / room)
    for room in ("train", "train/rank", "train/layouts", "allocate/layouts")
)

from chain_cases import brute_force
from layout_ranks import structure_of
from training_case import NO_SPARE, request, rows

from trainwright.estimator.devices import EMULATED_SAMPLE_S
from trainwright.estimator.predict.step_time import predict_curve
from trainwright.tasks.allocate.actions.network import RankNetwork
from trainwright.tasks.allocate.layouts.choose import micro_batches
from trainwright.tasks.allocate.pipelines.stage_chain import StageChain, stage_chain
from trainwright.tasks.allocate.planner import make_plan
from trainwright.tasks.runs.artefacts.estimate import Estimate
from trainwright.tasks.runs.artefacts.layout import StageSchedule
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.spec.pool import Pool
from trainwright.tasks.spec.train_spec import LayoutSpec
from trainwright.tasks.train import TrainRequest, train

SPEEDS = {"two": [1.0] * 2, "four": [1.0] * 4, "unlike": [4.0, 2.0, 1.0, 1.0]}
WARM_UP_STEPS = 2
MODEL = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU()) for _ in range(BLOCKS)
        )
        self.head = torch.nn.Linear(16, 10)

    def forward(self, images):
        rows = images.flatten(1)[:, 24:40]
        for block in self.blocks:
            rows = block(rows)
        return self.head(rows)


def build_model(norm=False, dropout=0.0, broken=False):
    return Net()
"""


@dataclass(frozen=True)
class Case:
    """A pipeline to train."""

    devices: str
    micro_batches: int
    schedule: StageSchedule

    @property
    def speeds(self) -> list[float]:
        return SPEEDS[self.devices]

    def __str__(self) -> str:
        return f"{self.devices:7} {self.micro_batches:3} {self.schedule:11}"


@dataclass
class Measured:
    """Steps in seconds."""

    plan: Plan | None = None
    steps: list[float] = field(default_factory=list)

    @property
    def step_s(self) -> float:
        return statistics.median(self.steps)

    @property
    def predicted_s(self) -> float:
        assert self.plan is not None
        assert self.plan.predicted is not None
        return self.plan.predicted.step_time_s.median


def asked_for_training(folder: Path, given: argparse.Namespace, ranks: int) -> TrainRequest:
    """The training; its plan is replaced."""
    samples = [given.batch, *([0] * (ranks - 1))]
    asked = request(
        folder,
        samples,
        validation_fraction=1 - given.batch * given.steps / 1797,
        backend="torch",
        optimizer={"name": "sgd"},
        checkpoint={"every_steps": 10_000},
        **NO_SPARE,
    )
    source = MODEL.replace("BLOCKS", str(given.model_blocks))
    (Path(asked.source_folder) / "net.py").write_text(source)
    return asked


def scale_of(given: argparse.Namespace, speeds: list[float]) -> float:
    """The factor on speeds with which an ideal step takes the seconds that were asked for."""
    return given.batch * EMULATED_SAMPLE_S / given.ideal / sum(speeds)


def estimate_of(asked: TrainRequest, batch: int, speeds: list[float]) -> Estimate:
    """The estimate for emulated devices of these speeds."""
    structure = structure_of(asked, batch)
    return Estimate(
        mode="datasheet",
        curves=[
            predict_curve(structure, None, device_type="emulated", speed=speed)
            for speed in sorted({*speeds})
        ],
        layers=[one.facts() for one in structure.layer_work],
        units=structure.units,
        gradient_bytes=float(structure.parameter_bytes),
    )


def planned(
    asked: TrainRequest, estimate: Estimate, speeds: list[float], batch: int, layout: Any
) -> Plan:
    """The plan on these devices in a layout."""
    devices = [{"type": "emulated", "speed": speed} for speed in speeds]
    pool = Pool.model_validate({"name": "p", "hosts": [{"name": "here", "devices": devices}]})
    job = asked.job
    wanted = job.train.model_copy(update={"layout": layout, "global_batch_size": batch})
    changed = {
        "train": wanted,
        "devices": job.devices.model_copy(update={"min_count": len(speeds)}),
        "objective": job.objective.model_copy(update={"minimize": "time"}),
    }
    return make_plan(job.model_copy(update=changed), pool, estimate, asked.schema_)


def trained(asked: TrainRequest, plan: Plan) -> list[float]:
    """Seconds of each measured step of a training by a plan."""
    train(asked.model_copy(update={"plan": plan}))
    times: list[Any] = [row["step_time_s"] for row in rows(asked, "steps-rank0")]
    return times[WARM_UP_STEPS:]


def measure(case: Case, given: argparse.Namespace, found: Measured, alone: Measured) -> None:
    """Plan and train a pipeline once, and one device."""
    speeds = [scale_of(given, case.speeds) * one for one in case.speeds]
    spec = LayoutSpec(
        name="pipeline",
        stages=len(speeds),
        micro_batches=case.micro_batches,
        schedule=case.schedule,
    )
    with tempfile.TemporaryDirectory() as folder:
        asked = asked_for_training(Path(folder), given, len(speeds))
        estimate = estimate_of(asked, given.batch, speeds)
        found.plan = planned(asked, estimate, speeds, given.batch, spec)
        found.steps += trained(asked, found.plan)
    if case.devices == "unlike":
        return  # compared with what its devices could do together
    with tempfile.TemporaryDirectory() as folder:
        asked = asked_for_training(Path(folder), given, 1)
        one = planned(asked, estimate, speeds[:1], given.batch, "data-parallel")
        alone.steps += trained(asked, one)


def chain_of(case: Case, given: argparse.Namespace) -> StageChain:
    """The chain that the plan's partition divides."""
    speeds = [scale_of(given, case.speeds) * one for one in case.speeds]
    with tempfile.TemporaryDirectory() as folder:
        asked = asked_for_training(Path(folder), given, len(speeds))
        estimate = estimate_of(asked, given.batch, speeds)
        plan = planned(asked, estimate, speeds, given.batch, "data-parallel")
    curves = [estimate.curve(device) for device in plan.devices]
    return stage_chain(
        estimate.layers,
        estimate.units,
        curves,
        RankNetwork.of(plan.devices, plan.links),
        micro_batches(given.batch, case.micro_batches),
        tensors=2,
        room_bytes=[float("inf")] * len(curves),
        passes=estimate.pass_cost,
    )


def printed(case: Case, given: argparse.Namespace, found: Measured, alone: Measured) -> None:
    step_s, predicted_s = found.step_s, found.predicted_s
    spread = f"{min(found.steps):.3f} to {max(found.steps):.3f}"
    words = (
        f"{case} {step_s:.3f} s ({spread}), predicted {predicted_s:.3f} "
        f"({100 * (predicted_s / step_s - 1):+.1f} %)"
    )
    stages, parts = len(case.speeds), case.micro_batches
    bubble = (stages - 1) / (parts + stages - 1)
    if alone.steps:
        words += f", {alone.step_s / step_s:.2f} times one device ({alone.step_s:.3f} s)"
    else:
        best_s = brute_force(chain_of(case, given), case.schedule)
        words += (
            f", {100 * best_s / step_s:.1f} % of the best division's ({best_s:.3f} s, predicted "
            f"{100 * best_s / predicted_s:.1f} %), {100 * given.ideal / (1 - bubble) / step_s:.1f} "
            "% of the speeds' sum less the ideal bubble"
        )
    print(words, flush=True)


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cases", nargs="+", default=["two:8", "four:8", "four:32", "unlike:8", "unlike:32"]
    )
    parser.add_argument("--schedules", nargs="+", default=["gpipe", "1f1b", "zero-bubble"])
    parser.add_argument("--ideal", type=float, default=0.5, help="s")
    parser.add_argument("--batch", type=int, default=64, help="samples of a step")
    parser.add_argument("--steps", type=int, default=6, help="of each training")
    parser.add_argument("--blocks", type=int, default=3, help="trainings of each case")
    parser.add_argument("--model-blocks", type=int, default=24)
    given = parser.parse_args()
    cases = []
    for text in given.cases:
        devices, _, parts = text.partition(":")
        cases += [Case(devices, int(parts), schedule) for schedule in given.schedules]
    found = {case: (Measured(), Measured()) for case in cases}
    for _ in range(given.blocks):
        for case in cases:
            measure(case, given, *found[case])
            steps = [round(one, 3) for one in found[case][0].steps]
            print(case, steps, file=sys.stderr, flush=True)
    for case in cases:
        printed(case, given, *found[case])


if __name__ == "__main__":
    main()
