"""Whether the planner's layout is the fastest one measured if memory caps rule some out.

    python tests/benchmarks/train/capped_layout_choice.py [--slice 1/6] [--out FILE]
        [--shapes wide narrow both] [--caps 0.3 0.4 0.5 0.65 0.8] [--rates 50 200]
        [--batch 64] [--speeds 0.03 0.015] [--steps 6]
    python tests/benchmarks/train/capped_layout_choice.py --summary FILE …

Each case is a chain of blocks, a cap on the memory of both hosts of a lab (`tests/lab.py`, needs
root) and a network between them. The cap is the memory of a process and a share of what the rest of
data parallel's step takes. The case is planned with gradients summed, with recomputation, dense
layers late-multiplied, and sharded, as a pipeline, and as the planner wants (`auto`). Each plan
that fits is trained by real ranks; computing is emulated by layer, messages are real. Printed are
predicted and measured steps, which plan was the fastest, how much slower the planner's own was, and
the measured peak memory as a share of the cap. With `--slice K/N`, every N-th case from the K-th.
A case without any plan counts as right if no layout has one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
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
import layout_choice
from layout_ranks import structure_of
from training_case import rows

from trainwright.estimator.predict.step_time import predict_curve
from trainwright.tasks.allocate.planner import make_plan
from trainwright.tasks.errors import BadInput, Infeasible
from trainwright.tasks.runs.artefacts.estimate import Estimate
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.spec.pool import Pool
from trainwright.tasks.spec.train_spec import LayoutSpec
from trainwright.tasks.train import TrainRequest, train

SHAPES = {"wide": (1024, 4096, 3, 1), "narrow": (64, 4096, 6, 12), "both": (256, 4096, 4, 6)}
"""Width, inner width, blocks, rows of each sample: parameters, activations, or both take memory."""
LAYOUTS: dict[str, Any] = {
    "sum": LayoutSpec(dense="sum", recompute="none"),
    "recompute": LayoutSpec(dense="sum", recompute="all"),
    "factors": LayoutSpec(dense="factors"),
    "rows": LayoutSpec(dense="rows"),
    "pipeline": "pipeline",
    "auto": "auto",
}
MODEL = """
import torch


class Block(torch.nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, inner), torch.nn.Linear(inner, width)

    def forward(self, values):
        return self.down(torch.relu(self.up(values)))


class Net(torch.nn.Module):
    def __init__(self, width, inner, blocks, rows):
        super().__init__()
        self.width, self.rows = width, rows
        self.blocks = torch.nn.ModuleList(Block(width, inner) for _ in range(blocks))
        self.head = torch.nn.Linear(width, 10)

    def forward(self, images):
        values = images.flatten(1).repeat(1, self.width // 64).unsqueeze(1)
        values = values.repeat(1, self.rows, 1)
        for block in self.blocks:
            values = block(values)
        return self.head(values.mean(1))


def build_model(norm=False, dropout=0.0, broken=False):
    return Net(*SHAPE)
"""
Case = tuple[str, float, float]
"""Shape, cap, Mbit/s."""


class CappedCase:
    """A case's request and its plans."""

    def __init__(
        self, made: lab.Lab, folder: Path, case: Case, asked_for: argparse.Namespace
    ) -> None:
        shape, share, rate = case
        self._made, self._asked_for, self._rate = made, asked_for, rate
        source = MODEL.replace("SHAPE", repr(SHAPES[shape]))
        self.asked: TrainRequest = layout_choice.request_of(
            folder, made, source, asked_for.batch, asked_for
        )
        self._structure = structure_of(self.asked, asked_for.batch)
        whole = self.plan(LAYOUTS["sum"], None)
        process = max(one.process_bytes for one in self._curves(None))
        most = max(one.peak_memory_bytes for one in whole.devices)
        self.cap_bytes = process + share * (most - process)

    def _curves(self, limit: float | None) -> list[Any]:
        return [
            predict_curve(self._structure, None, device_type="emulated", speed=speed).model_copy(
                update={"memory_limit_bytes": limit}
            )
            for speed in sorted({*self._asked_for.speeds})
        ]

    def plan(self, layout: Any, limit: float | None) -> Plan:
        """The plan with a memory limit. Raises Infeasible, BadInput."""
        speeds, structure, job = self._asked_for.speeds, self._structure, self.asked.job
        hosts = self._made.pool([[{"type": "emulated", "speed": speed}] for speed in speeds])
        network = {"bandwidth": f"{self._rate:g}Mbit", "latency": layout_choice.LATENCY}
        estimate = Estimate(
            mode="datasheet",
            curves=self._curves(limit),
            layers=[one.facts() for one in structure.layer_work],
            units=structure.units,
            step=structure.recorded_step(),
            gradient_bytes=float(structure.parameter_bytes),
        )
        train_spec = job.train.model_copy(
            update={
                "layout": layout,
                "global_batch_size": self._asked_for.batch,
                "epochs": layout_choice.PLANNED_EPOCHS,
            }
        )
        changed = {
            "train": train_spec,
            "devices": job.devices.model_copy(update={"min_count": 2}),
            "objective": job.objective.model_copy(update={"minimize": "time"}),
        }
        pool = Pool.model_validate({**hosts, "network": network})
        return make_plan(job.model_copy(update=changed), pool, estimate, self.asked.schema_)

    def measured(self, plan: Plan) -> tuple[float, float]:
        """The median step in seconds, and the largest peak memory of a rank in bytes."""
        result = train(self.asked.model_copy(update={"plan": plan}))
        times = [row["step_time_s"] for row in rows(self.asked, "steps-rank0")]
        peak = max(one.peak_memory_bytes for one in result.devices)
        return statistics.median(times[layout_choice.WARM_UP_STEPS :]), peak


def measure(made: lab.Lab, case: Case, asked_for: argparse.Namespace) -> dict[str, Any]:
    """Plan and train a case in each layout that fits."""
    found: dict[str, Any] = {"case": case, "layouts": {}, "name": ""}
    known: dict[str, dict[str, float]] = {}
    for name, layout in LAYOUTS.items():
        with tempfile.TemporaryDirectory() as folder:
            one = CappedCase(made, Path(folder), case, asked_for)
            try:
                plan = one.plan(layout, one.cap_bytes)
            except (Infeasible, BadInput) as error:
                found["layouts"][name] = {"refused": str(error)}
                continue
            assert plan.predicted is not None
            assert plan.layout is not None
            key = plan.layout.model_dump_json(exclude={"name"})
            if key not in known:
                step_s, peak = one.measured(plan)
                known[key] = {"step_s": step_s, "peak": peak / one.cap_bytes}
            predicted_s = plan.predicted.step_time_s.median
            found["layouts"][name] = {**known[key], "predicted_s": predicted_s}
            if name == "auto":
                again = " with recomputation" if plan.layout.recomputes else ""
                found["name"] = plan.layout.name + again
    return found


def line(found: dict[str, Any]) -> str:
    shape, share, rate = found["case"]
    texts = []
    for name, one in found["layouts"].items():
        if "step_s" in one:
            texts.append(f"{name} {1e3 * one['predicted_s']:.0f}:{1e3 * one['step_s']:.0f}")
        else:
            texts.append(f"{name} -")
    peaks = [one["peak"] for one in found["layouts"].values() if "peak" in one]
    most = f"{100 * max(peaks):.0f} % of the cap" if peaks else "nothing fits"
    return f"{shape:>6} {share:4} {rate:5g} Mbit/s  {'  '.join(texts)} ms  {found['name']}, {most}"


def summary(cases: list[dict[str, Any]]) -> str:
    """How often the planner's own layout was the fastest, and how much memory was taken."""
    close, slower, over, refused, chosen_peaks = 0, [], 0, 0, []
    for one in cases:
        measured = {name: each for name, each in one["layouts"].items() if "step_s" in each}
        over += sum(each["peak"] > 1 for each in measured.values())
        if not measured:
            close += 1
            continue
        if "auto" not in measured:
            refused += 1
            continue
        fastest = min(each["step_s"] for each in measured.values())
        slower.append(measured["auto"]["step_s"] / fastest - 1)
        chosen_peaks.append(measured["auto"]["peak"])
        close += slower[-1] <= layout_choice.CLOSE
    worst = f"{100 * max(slower):.1f} %" if slower else "-"
    peak = f"{100 * max(chosen_peaks):.0f} %" if chosen_peaks else "-"
    return (
        f"within {100 * layout_choice.CLOSE:.0f} % of the fastest in {close} of {len(cases)} "
        f"cases, at most {worst} slower; refused though a layout fits: {refused}; plans over the "
        f"cap: {over}; the planner's own took at most {peak} of the cap"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES], default=[*SHAPES])
    parser.add_argument("--caps", type=float, nargs="+", default=[0.3, 0.4, 0.5, 0.65, 0.8])
    parser.add_argument("--rates", type=float, nargs="+", default=[50, 200])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--speeds", type=float, nargs=2, default=[0.03, 0.015])
    parser.add_argument("--steps", type=int, default=6, help="of each training")
    parser.add_argument("--slice", default="1/1", help="K/N: every N-th case from the K-th on")
    parser.add_argument("--out", type=Path, help="each case as a line of JSON is added to it")
    parser.add_argument("--summary", type=Path, nargs="+", help="only sum up these files")
    asked_for = parser.parse_args()
    if asked_for.summary:
        texts = [text for file in asked_for.summary for text in file.read_text().splitlines()]
        print(summary([json.loads(text) for text in texts]))
        return
    first, every = map(int, asked_for.slice.split("/"))
    cases = list(itertools.product(asked_for.shapes, asked_for.caps, asked_for.rates))
    done = []
    for rate in asked_for.rates:
        own = [case for case in cases[first - 1 :: every] if case[2] == rate]
        if not own:
            continue
        rate_of_tc = f"{rate:.0f}mbit"
        with lab.running(cores=[None, None], rate=rate_of_tc, private_size="1g") as made:
            for case in own:
                done.append(measure(made, case, asked_for))
                print(line(done[-1]), flush=True)
                if asked_for.out:
                    with asked_for.out.open("a") as file:
                        file.write(json.dumps(done[-1]) + "\n")
    print(summary(done))


if __name__ == "__main__":
    main()
