"""Predicted and measured steps of layouts, on emulated devices of two hosts with a slow link.

    python tests/benchmarks/train/predicted_steps.py [--rate 200mbit] [--speeds 0.5 0.25]
        [--batches 32 96] [--widths 1024,1024,256 512,2048,10] [--steps 16] [--blocks 2]

Real ranks on the hosts of a lab (`tests/lab.py`, needs root). Messages are real. Computing is
emulated by layer, by the same costs that predict it, so the errors are those of the network and of
the order of actions only. For each model, batch and layout, the simulator's step stands beside the
median of the measured ones. Printed are both, the error of each, the median and the 90th percentile
of the errors, and as noise the difference between the blocks.
"""

from __future__ import annotations

import argparse
import itertools
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
from hosts_case import on_hosts
from layout_ranks import structure_of, with_layout
from layouts_on_hosts import MODEL
from training_case import NO_SPARE, rows

from trainwright.estimator.predict.communication import Link
from trainwright.estimator.predict.step_time import predict_curve
from trainwright.tasks.allocate.actions.network import RankNetwork
from trainwright.tasks.allocate.actions.step_simulator import StepSimulator
from trainwright.tasks.allocate.layouts.averages import AverageTimes
from trainwright.tasks.allocate.layouts.predicted_kinds import by_kind
from trainwright.tasks.allocate.plan.split import shares
from trainwright.tasks.runs.artefacts.layout import Sync
from trainwright.tasks.runs.artefacts.step_kinds import mean_by_kind
from trainwright.tasks.train import train

LAYOUTS = ("data-parallel", "late-multiply", "sharded", "hybrid")
LATENCY_S = 2e-4
WARM_UP_STEPS = 2


def syncs_of(layout: str, names: list[str]) -> dict[str, Sync]:
    """How a layout keeps these layers equal; hybrid: the first one is summed, the last sharded."""
    if layout == "late-multiply":
        return dict.fromkeys(names, "factors")
    if layout == "sharded":
        return dict.fromkeys(names, "rows")
    if layout == "hybrid":
        middle: dict[str, Sync] = dict.fromkeys(names[1:-1], "factors")
        return {**middle, names[-1]: "rows"}
    return {}


def step_of(
    made: lab.Lab, asked_for: argparse.Namespace, layout: str, widths: list[int], batch: int
) -> tuple[float, list[float], str]:
    """Predicted and measured seconds, and both by kind."""
    speeds, names = asked_for.speeds, [f"dense.{number}" for number in range(len(widths) - 1)]
    batches = shares(batch, [round(1000 * one) for one in speeds])
    with tempfile.TemporaryDirectory() as folder:
        asked = on_hosts(
            Path(folder),
            made,
            batches,
            validation_fraction=1 - batch * asked_for.steps / 1797,
            backend="torch",
            optimizer={"name": "sgd"},
            checkpoint={"every_steps": 10_000},
            **NO_SPARE,
        )
        source = Path(asked.source_folder) / "net.py"
        source.write_text(MODEL.replace("WIDTHS", repr(widths)))
        structure = structure_of(asked, batch)
        curves = [
            predict_curve(structure, None, device_type="emulated", speed=speed) for speed in speeds
        ]
        syncs = syncs_of(layout, names)
        cuts = {
            name: shares(width, [round(1000 * one) for one in speeds])
            for name, width in zip(names, widths[1:], strict=True)
            if syncs.get(name) == "rows"
        }
        asked = with_layout(asked, syncs, cuts)
        devices = [
            device.model_copy(update={"speed": speed})
            for device, speed in zip(asked.plan.devices, speeds, strict=True)
        ]
        plan = asked.plan.model_copy(
            update={"devices": devices, "emulated_layers": list(curves[0].layers)}
        )
        asked = asked.model_copy(update={"plan": plan})
        chosen, facts = plan.layout, plan.layers
        assert chosen is not None
        link = Link(
            bandwidth_bytes_per_s=bytes_per_s(asked_for.rate), latency_s=LATENCY_S, spread=0.0
        )
        hosts = tuple(host.name for host in made.hosts)
        network = RankNetwork(hosts, dict.fromkeys(hosts, link), dict.fromkeys(hosts, link))
        step = StepSimulator(facts, curves, network)(chosen)
        averages = AverageTimes.of(asked.job.train, batch * asked_for.steps, batch)
        result = train(asked)
        times: list[Any] = [row["step_time_s"] for row in rows(asked, "steps-rank0")]
        predicted = mean_by_kind(by_kind(step, chosen, facts, averages))
        measured = mean_by_kind(result.measured.by_kind)
        kinds = ", ".join(
            f"{kind} {predicted[field, kind] * 1e3:.1f}:{measured[field, kind] * 1e3:.1f}"
            for field, kind in measured
            if field != "sent_bytes" and (predicted[field, kind] or measured[field, kind]) > 5e-4
        )
        return step.step_s, times[WARM_UP_STEPS:], kinds


def bytes_per_s(rate: str) -> float:
    """The bytes a second of a rate in tc's syntax, in mbit."""
    return float(rate.removesuffix("mbit")) * 1e6 / 8


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="200mbit", help="each host's link, in mbit")
    parser.add_argument("--speeds", type=float, nargs=2, default=[0.5, 0.25], help="of the devices")
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 96], help="of a step")
    parser.add_argument("--widths", nargs="+", default=["1024,1024,256", "512,2048,10"])
    parser.add_argument("--steps", type=int, default=16, help="of each training")
    parser.add_argument("--blocks", type=int, default=2, help="trainings of each case")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    asked_for = parser.parse_args()
    cases = list(itertools.product(asked_for.widths, asked_for.batches, asked_for.layouts))
    predicted: dict[Any, float] = {}
    blocks: dict[Any, list[float]] = {case: [] for case in cases}
    with lab.running(cores=[None, None], rate=asked_for.rate, private_size="1g") as made:
        for _ in range(asked_for.blocks):
            for case in cases:
                widths, batch, layout = case
                sizes = [int(one) for one in widths.split(",")]
                predicted[case], steps, kinds = step_of(made, asked_for, layout, sizes, batch)
                blocks[case].append(statistics.median(steps))
                print(case, kinds, "(ms, predicted:measured)", file=sys.stderr, flush=True)
    print(f"{'model':>16} batch {'layout':14} predicted, ms  measured   error")
    errors, noise = [], []
    for case in cases:
        measured = statistics.median(blocks[case])
        error = predicted[case] / measured - 1
        errors.append(abs(error))
        noise.append(max(blocks[case]) / min(blocks[case]) - 1)
        widths, batch, layout = case
        print(
            f"{widths:>16} {batch:5} {layout:14} {1e3 * predicted[case]:13.1f} "
            f"{1e3 * measured:9.1f} {100 * error:+6.1f}%"
        )
    p90 = sorted(errors)[min(len(errors) - 1, round(0.9 * len(errors)))]
    print(
        f"error: median {100 * statistics.median(errors):.1f} %, p90 {100 * p90:.1f} %; "
        f"between blocks: median {100 * statistics.median(noise):.1f} %, "
        f"most {100 * max(noise):.1f} %"
    )


if __name__ == "__main__":
    main()
