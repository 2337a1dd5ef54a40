"""Whether the planner's layout is the fastest one measured, and how well steps are predicted.

    python tests/benchmarks/train/layout_choice.py [--rates 25 50 100 200] [--blocks 1]
        [--shapes 256,256,10 1024,1024,64 …] [--batches 32 128] [--speeds 0.5 0.25] [--steps 10]

Each case is a dense network, a global batch and a network between the two hosts of a lab
(`tests/lab.py`, needs root). It is planned with gradients summed, dense layers late-multiplied, and
sharded, and as the planner wants (`auto`), and each plan is trained by real ranks; computing is
emulated by layer, messages are real. Printed are predicted and measured steps, which plan was the
fastest, and how much slower the planner's own was. The layouts of a case take turns in each block.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.extend(
    str(Path(__file__).parents[2] / "tasks" / "train" / room)
    for room in ("", "hosts", "rank", "layouts")
)

import lab
from hosts_case import on_hosts
from layout_ranks import structure_of
from layouts_on_hosts import MODEL
from training_case import NO_SPARE, rows

from trainwright.estimator.predict.step_time import predict_curve
from trainwright.tasks.allocate.plan.split import shares
from trainwright.tasks.allocate.planner import make_plan
from trainwright.tasks.runs.artefacts.estimate import Estimate
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.spec.pool import Pool
from trainwright.tasks.spec.train_spec import LayoutSpec
from trainwright.tasks.train import TrainRequest, train

LAYOUTS: dict[str, Any] = {
    "sum": "data-parallel",
    "factors": LayoutSpec(dense="factors"),
    "rows": LayoutSpec(dense="rows"),
    "auto": "auto",
}
LATENCY = "200us"
WARM_UP_STEPS = 2
PLANNED_EPOCHS = 10_000
"""so that a plan is compared by its steps, not by starting"""
CLOSE = 0.05


@dataclass
class Measured:
    """A case: by layout, its plan's predicted step and the medians of its trainings, in s."""

    predicted: dict[str, float] = field(default_factory=dict)
    blocks: dict[str, list[float]] = field(default_factory=dict)
    name: str = ""
    """of the planner's own layout"""

    def step_s(self, layout: str) -> float:
        return statistics.median(self.blocks[layout])


def request_of(
    folder: Path, made: lab.Lab, source: str, batch: int, asked_for: argparse.Namespace
) -> TrainRequest:
    """A training of this model on the lab's hosts."""
    asked = on_hosts(
        folder,
        made,
        shares(batch, [round(1000 * one) for one in asked_for.speeds]),
        validation_fraction=1 - batch * asked_for.steps / 1797,
        backend="torch",
        optimizer={"name": "sgd"},
        checkpoint={"every_steps": 10_000},
        **NO_SPARE,
    )
    (Path(asked.source_folder) / "net.py").write_text(source)
    return asked


def step_times(asked: TrainRequest, plan: Plan) -> list[float]:
    """Seconds of each measured step of a training by a plan."""
    train(asked.model_copy(update={"plan": plan}))
    times: list[Any] = [row["step_time_s"] for row in rows(asked, "steps-rank0")]
    return times[WARM_UP_STEPS:]


def planned(
    made: lab.Lab, asked: TrainRequest, rate: float, speeds: list[float], batch: int, layout: Any
) -> Plan:
    """The plan of a request on the lab's hosts."""
    structure = structure_of(asked, batch)
    hosts = made.pool([[{"type": "emulated", "speed": speed}] for speed in speeds])
    network = {"bandwidth": f"{rate:g}Mbit", "latency": LATENCY}
    pool = Pool.model_validate({**hosts, "network": network})
    curves = [
        predict_curve(structure, None, device_type="emulated", speed=speed)
        for speed in sorted({*speeds})
    ]
    estimate = Estimate(
        mode="datasheet",
        curves=curves,
        layers=[one.facts() for one in structure.layer_work],
        gradient_bytes=float(structure.parameter_bytes),
    )
    job = asked.job
    wanted = job.train.model_copy(
        update={"layout": layout, "global_batch_size": batch, "epochs": PLANNED_EPOCHS}
    )
    both = job.devices.model_copy(update={"min_count": 2})
    objective = job.objective.model_copy(update={"minimize": "time"})
    changed = {"train": wanted, "devices": both, "objective": objective}
    return make_plan(job.model_copy(update=changed), pool, estimate, asked.schema_)


def measure(
    made: lab.Lab, case: tuple[str, int, float], asked_for: argparse.Namespace, found: Measured
) -> None:
    """Plan and train a case in each layout, once."""
    shape, batch, rate = case
    widths = [64, *(int(one) for one in shape.split(","))]
    trained: dict[str, tuple[Any, float]] = {}
    for name, layout in LAYOUTS.items():
        with tempfile.TemporaryDirectory() as folder:
            asked = on_hosts(
                Path(folder),
                made,
                shares(batch, [round(1000 * one) for one in asked_for.speeds]),
                validation_fraction=1 - batch * asked_for.steps / 1797,
                backend="torch",
                optimizer={"name": "sgd"},
                checkpoint={"every_steps": 10_000},
                **NO_SPARE,
            )
            (Path(asked.source_folder) / "net.py").write_text(MODEL.replace("WIDTHS", repr(widths)))
            plan = planned(made, asked, rate, asked_for.speeds, batch, layout)
            assert plan.predicted is not None
            assert plan.layout is not None
            found.predicted[name] = plan.predicted.step_time_s.median
            if name == "auto":
                found.name = plan.layout.name
            key = plan.layout.model_dump_json(exclude={"name"})
            known = next((one for one, (same, _) in trained.items() if same == key), None)
            if known is None:
                trained[name] = key, statistics.median(step_times(asked, plan))
            else:
                trained[name] = key, trained[known][1]
        found.blocks.setdefault(name, []).append(trained[name][1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", type=float, nargs="+", default=[25, 50, 100, 200])
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=["256,256,10", "1024,1024,64", "2048,512,10", "512,2048,2048,10", "128,4096,10"],
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--speeds", type=float, nargs=2, default=[0.5, 0.25])
    parser.add_argument("--steps", type=int, default=10, help="of each training")
    parser.add_argument("--blocks", type=int, default=1)
    asked_for = parser.parse_args()
    cases = list(itertools.product(asked_for.shapes, asked_for.batches, asked_for.rates))
    found = {case: Measured() for case in cases}
    for _ in range(asked_for.blocks):
        for rate in asked_for.rates:
            rate_of_tc = f"{rate:.0f}mbit"
            with lab.running(cores=[None, None], rate=rate_of_tc, private_size="1g") as made:
                for case in cases:
                    if case[2] == rate:
                        measure(made, case, asked_for, found[case])
                        print(_line(case, found[case]), flush=True)
    _summary(found)


def _line(case: tuple[str, int, float], one: Measured) -> str:
    shape, batch, rate = case
    times = "  ".join(
        f"{name} {1e3 * one.predicted[name]:6.1f}:{1e3 * one.step_s(name):6.1f}" for name in LAYOUTS
    )
    return f"{shape:>18} {batch:4} {rate:6g} Mbit/s  {times} ms  {one.name}"


def _summary(found: dict[Any, Measured]) -> None:
    first, close, errors, slower, noise = 0, 0, [], [], []
    for one in found.values():
        fastest = min(one.step_s(name) for name in LAYOUTS)
        over = one.step_s("auto") / fastest - 1
        first, close = first + (over == 0), close + (over <= CLOSE)
        slower.append(over)
        errors += [abs(one.predicted[name] / one.step_s(name) - 1) for name in LAYOUTS]
        noise += [max(times) / min(times) - 1 for times in one.blocks.values()]
    errors.sort()
    print(
        f"the planner's layout is the fastest in {first} of {len(found)} cases, within "
        f"{100 * CLOSE:.0f} % in {close}; at most {100 * max(slower):.1f} % slower"
    )
    print(
        f"predicted steps: error median {100 * statistics.median(errors):.1f} %, "
        f"p90 {100 * errors[min(len(errors) - 1, round(0.9 * len(errors)))]:.1f} %; "
        f"between blocks: median {100 * statistics.median(noise):.1f} %"
    )


if __name__ == "__main__":
    main()
