"""Trains by plans, and compares them with other splits of the batch.

    python tests/benchmarks/planner/carried_out.py [--rounds N] [--only emulated|quota]

Each pool's job is planned for least time and for least energy at a given global batch. It is
trained from start to end by those plans and by (a) an even split over all devices, (b) the fastest
device alone, (c) all devices, each with its share. Rounds are interleaved in random order. The
table compares the median step time with the prediction, and time and energy per step of all
configurations. The energy is the measured times multiplied by the pool's power. The noise floor is
the difference between medians of the same configuration.

`emulated`: four devices of speed 4 : 2 : 1 : 1. `quota`: `dags/pools/two-cpus.yaml`, its shares of
a core scaled down if this process may use fewer cores than they add up to.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from trainwright.estimator.predict.energy import power_of
from trainwright.tasks.allocate.plan.collectives import RingShape
from trainwright.tasks.allocate.plan.cost import CostModel
from trainwright.tasks.allocate.plan.topology import Topology
from trainwright.tasks.allocate.planner import make_plan
from trainwright.tasks.allocate.preview import predicted
from trainwright.tasks.data import dataset
from trainwright.tasks.runs.artefacts.estimate import Estimate
from trainwright.tasks.runs.artefacts.plan import Plan, PlannedDevice
from trainwright.tasks.settings import Settings
from trainwright.tasks.spec.job import Job
from trainwright.tasks.spec.pool import Device, Pool
from trainwright.tasks.train import TrainRequest, train

REPOSITORY = Path(__file__).parents[3]
USED_CORES = 0.9  # the share of the cores for ranks: launcher and collectives need the rest
SMALL = """from torch.nn import *


def build_model():
    return Sequential(Flatten(), Linear(64, 10))
"""
EMULATED = {
    "name": "emulated",
    "hosts": [
        {
            "name": "sim",
            "devices": [{"type": "emulated", "speed": speed} for speed in (4.0, 2.0, 1.0, 1.0)],
        }
    ],
}


@dataclass
class Way:
    """One split of the batch, its prediction, and the measured seconds and joules per step.

    `quiet_s` is the 5th percentile of a round's steps, those least disturbed by other work.
    """

    devices: list[PlannedDevice]
    predicted_s: float
    names: list[str] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    quiet_s: list[float] = field(default_factory=list)
    step_j: list[float] = field(default_factory=list)


def quota_pool() -> dict[str, Any]:
    """Two CPU devices, no more than the cores that this process may use."""
    pool: dict[str, Any] = yaml.safe_load((REPOSITORY / "dags/pools/two-cpus.yaml").read_text())
    devices = pool["hosts"][0]["devices"]
    scale = min(
        1.0, USED_CORES * len(os.sched_getaffinity(0)) / sum(device["cores"] for device in devices)
    )
    for device in devices:
        device["cores"] = round(device["cores"] * scale, 2)
    return pool


def job_of(
    folder: Path, name: str, pool: dict[str, Any], batch: int, epochs: int, goal: str
) -> Job:
    """The digits job on this pool."""
    (folder / "pool.json").write_text(yaml.safe_dump(pool))
    (folder / "small.py").write_text(SMALL)
    jobs = REPOSITORY / "dags/jobs"
    small = {"source": str(folder / "small.py")}
    model = (
        small if name == "emulated" else {"source": str(jobs / "cnn.py"), "config": {"width": 32}}
    )
    train = {
        "epochs": epochs,
        "global_batch_size": batch,
        "learning_rate": 0.001,
        "adaptive_split": False,
        "checkpoint": {"every_steps": 10_000, "keep_best": False},
    }
    return Job.model_validate(
        {
            "name": name,
            "pool": str(folder / "pool.json"),
            "data": {"uri": "builtin:digits", "validation_fraction": 0.1},
            "model": model,
            "train": train,
            "objective": {"minimize": goal},
        }
    )


def ways_of(job: Job, pool: Pool, estimate: Estimate, schema: dataset.DataSchema) -> list[Way]:
    """The plans and the other splits. Merges equal ones, with both names."""
    devices = pool.devices()
    topology = Topology(CostModel(job, pool, estimate, schema), devices)
    batch = int(job.train.global_batch_size)

    def plan(**changes: Any) -> Plan:
        return make_plan(job.model_copy(update=changes), pool, estimate, schema)

    def filtered(**changes: Any) -> Any:
        return job.devices.model_copy(update=changes)

    fastest = min(devices, key=lambda one: estimate.curve(one).step_time(batch).median)
    even = [
        planned(
            device, batch * (place + 1) // len(devices) - batch * place // len(devices), estimate
        )
        for place, device in enumerate(devices)
    ]
    time_goal = job.objective.model_copy(update={"minimize": "time"})
    named = {
        "plan, least time": plan(objective=time_goal).devices,
        "plan, least energy": plan(
            objective=job.objective.model_copy(update={"minimize": "energy"})
        ).devices,
        "(a) even split": even,
        "(b) fastest alone": plan(devices=filtered(ids=[fastest.id])).devices,
        "(c) all devices": plan(
            objective=time_goal, devices=filtered(min_count=len(devices))
        ).devices,
    }
    ways: dict[tuple[tuple[str, int], ...], Way] = {}
    for name, chosen in named.items():
        key = tuple((device.id, device.batch_size) for device in chosen)
        slowest = max(
            estimate.curve(device).step_time(device.batch_size).median for device in chosen
        )
        sums = topology.collectives.time(RingShape(1, 0, len(chosen), len(chosen)))
        predicted_s = float(sums.at(0.0).step_s(slowest))
        ways.setdefault(key, Way(chosen, predicted_s)).names.append(name)
    return list(ways.values())


def planned(device: Device, batch: int, estimate: Estimate) -> PlannedDevice:
    """A device with its share, as in a plan."""
    curve = estimate.curve(device)
    return PlannedDevice(
        **device.model_dump(),
        batch_size=batch,
        step_time_s=curve.step_time(batch),
        peak_memory_bytes=curve.device_memory_bytes(batch),
        power=power_of(curve),
    )


def carry_out(job: Job, way: Way, plan: Plan, schema: dataset.DataSchema, folder: Path) -> None:
    """Train with this split, and record the median step time and its energy."""
    assert job.model is not None
    source = Path(job.model.source)
    result = train(
        TrainRequest(
            job=job,
            plan=plan.model_copy(update={"devices": way.devices}),
            learning_rate=0.001,
            schema=schema,
            source_folder=str(source.parent),
            entry=source.name,
            run_uri=None,
            work_folder=str(folder),
            resume=False,
        )
    )
    assert result.measured.step_time_s is not None
    step_s = result.measured.step_time_s.median
    joules = 0.0
    for device, done in zip(way.devices, result.devices, strict=True):
        assert device.power is not None
        assert done.step_time_s is not None
        busy_s = done.step_time_s.median
        joules += device.power.load_w * busy_s + device.power.idle_w * max(0.0, step_s - busy_s)
    way.step_s.append(step_s)
    way.quiet_s.append(result.measured.step_time_s.low)
    way.step_j.append(joules)


def spread(values: Sequence[float]) -> float:
    """(largest − smallest) / median."""
    return (max(values) - min(values)) / statistics.median(values)


def show(ways: Sequence[Way]) -> None:
    """The table of a pool."""
    print(
        f"{'way':45} {'shares':>22} {'measured ms':>12} {'spread':>7} {'5 % ms':>7} "
        f"{'predicted':>10} {'error':>7} {'J/step':>8}"
    )
    for way in ways:
        measured = statistics.median(way.step_s)
        shares = " ".join(f"{device.batch_size}" for device in way.devices)
        print(
            f"{' = '.join(way.names):45.45} {shares:>22} {measured * 1e3:12.2f} "
            f"{spread(way.step_s):7.1%} {statistics.median(way.quiet_s) * 1e3:7.2f} "
            f"{way.predicted_s * 1e3:10.2f} {way.predicted_s / measured - 1:+7.1%} "
            f"{statistics.median(way.step_j):8.4f}"
        )
    floor = statistics.median(spread(way.step_s) for way in ways)
    print(f"noise floor (median spread between rounds of one way): {floor:.1%}")
    for name, values in (("time", "step_s"), ("energy", "step_j")):
        of = {one: statistics.median(getattr(way, values)) for way in ways for one in way.names}
        plan = of[f"plan, least {name}"]
        others = ", ".join(
            f"{other[4:]} {of[other] / plan:.2f}" for other in of if other.startswith("(")
        )
        print(f"{name} of the other ways, relative to the plan for least {name}: {others}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=["emulated", "quota"])
    chosen = parser.parse_args()
    draw = random.Random(0)
    for name, pool, batch, epochs in (
        ("emulated", EMULATED, 400, 6),
        ("quota", quota_pool(), 96, 3),
    ):
        if chosen.only not in (None, name):
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            os.environ["TRAINWRIGHT_STORE"] = (folder / "store").as_uri()
            os.environ.setdefault("TRAINWRIGHT_HOME", str(folder / "home"))
            job = job_of(folder, name, pool, batch, epochs, "time")
            loaded, estimate, schema = predicted(job, Settings.from_environment())
            plan = make_plan(job, loaded, estimate, schema)
            ways = ways_of(job, loaded, estimate, schema)
            for _ in range(chosen.rounds):
                for number, way in draw.sample([*enumerate(ways)], len(ways)):
                    carry_out(job, way, plan, schema, folder / f"work-{number}")
        devices = ", ".join(f"{one.id} {one.cores or one.speed}" for one in loaded.devices())
        print(f"\n{name}: {devices}; global batch {batch}; {chosen.rounds} rounds")
        took_s, load = time.monotonic() - began, os.getloadavg()[0]
        print(f"{took_s:.0f} s; load average {load:.1f} (above the number of cores: not quiet)")
        show(ways)


if __name__ == "__main__":
    main()
