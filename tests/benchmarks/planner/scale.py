"""Measures planning time for growing pools.

    python tests/benchmarks/planner/scale.py [--rounds N] [--jobs A,B] [--largest-only]

Pools of 8 types on hosts of 8 devices (of one type each, or mixed), up to 10,000 devices; and up to
100 types of 100 devices each. Time is CPU time of `make_plan`, alternatives and front included.
Rounds are interleaved in random order, and the spread between them is the noise. `solved` is the
wall time until the search found the plan. The gap is the search's bound: 0 is exact.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import defaultdict

from planner_cases import data_of

from trainwright.estimator.curves import Affine, DeviceCurve
from trainwright.tasks.allocate.planner import make_plan
from trainwright.tasks.runs.artefacts.estimate import Estimate
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.spec.job import Job
from trainwright.tasks.spec.pool import Device, Pool

GPUS = (
    "nvidia-t4",
    "nvidia-l4",
    "nvidia-a10",
    "nvidia-v100-32gb",
    "nvidia-a100-40gb",
    "nvidia-l40s",
    "nvidia-a100-80gb",
    "nvidia-h100-80gb",
)


def estimate_for(devices: list[Device], types: int, seed: int) -> Estimate:
    """Curves that differ by type in speed, fixed part, power and memory.

    `speed` distinguishes 100 types.
    """
    draw = random.Random(seed)
    curves = {}
    for device in devices:
        if device.variant not in curves:
            fast = draw.uniform(1.0, 12.0)
            idle = draw.uniform(10, 80)
            curves[device.variant] = DeviceCurve(
                device_type=device.type,
                cores=device.cores,
                speed=device.speed,
                mode="datasheet",
                coverage=1.0,
                step_time_s=Affine(fixed=draw.uniform(1e-3, 4e-3), per_sample=4e-3 / fast),
                low_factor=0.7,
                high_factor=draw.choice([1.2, 1.4, 1.6]),
                peak_memory_bytes=Affine(fixed=2e9, per_sample=3e7),
                memory_safe_factor=1.2,
                memory_limit_bytes=draw.choice([12, 16, 24, 40, 80]) * 2.0**30,
                idle_w=idle,
                load_w=idle + draw.uniform(20, 40) * fast,
                energy_source="datasheet",
            )
    return Estimate(mode="datasheet", curves=list(curves.values()), gradient_bytes=1e8)


def gpu_pool(count: int, *, mixed: bool) -> Pool:
    """A pool of 8 types, with 8 devices per host, each host of one type or (`mixed`) of two."""
    hosts = []
    for number in range(count // 8):
        one, other = GPUS[number % 8], GPUS[(number // 8) % 8]
        devices = [{"type": one, "count": 8}]
        if mixed and one != other:
            devices = [{"type": one, "count": 4}, {"type": other, "count": 4}]
        hosts.append(
            {
                "name": f"h{number}",
                "address": f"10.{number // 250}.{number % 250}.1",
                "devices": devices,
            }
        )
    prices = {name: f"{0.5 + number}/h" for number, name in enumerate(GPUS)}
    network = {"bandwidth": "100Gbit", "latency": "20us"}
    return Pool.model_validate(
        {"name": "large", "network": network, "hosts": hosts, "prices": prices}
    )


def typed_pool(types: int, each: int) -> Pool:
    """A pool of types (emulated devices of different speed) with `each` devices, 10 per host."""
    hosts = [
        {
            "name": f"h{kind}-{number}",
            "address": f"10.{kind}.{number}.1",
            "devices": [{"type": "emulated", "speed": 1.0 + kind / 10, "count": 10}],
        }
        for kind in range(types)
        for number in range(each // 10)
    ]
    return Pool.model_validate(
        {"name": "types", "network": {"bandwidth": "100Gbit", "latency": "20us"}, "hosts": hosts}
    )


def job_of(goal: str, size: object, hours: float | None) -> Job:
    """A training of 1.2 million samples for 10 epochs."""
    objective = {"minimize": goal} | ({"deadline": f"{hours}h"} if hours else {})
    train = {"epochs": 10, "global_batch_size": size, "batch_bounds": [256, 8192]}
    return Job.model_validate(
        {"name": "j", "data": {"uri": "x"}, "train": train, "objective": objective}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jobs", help="only these, such as energy,time")
    parser.add_argument("--largest-only", action="store_true")
    chosen = parser.parse_args()
    pools = {}
    for count in [10_000] if chosen.largest_only else [16, 64, 256, 1024, 4096, 10_000]:
        pools[f"{count} devices, 8 types", count] = gpu_pool(count, mixed=False), 8
        if count >= 1024:
            pools[f"{count} devices, 8 types, mixed hosts", count] = gpu_pool(count, mixed=True), 8
    for types in [100] if chosen.largest_only else [10, 30, 100]:
        pools[f"{types} types of 100", types * 100] = typed_pool(types, 100), types
    jobs = {
        "energy": job_of("energy", 4096, None),
        "energy, 30 min": job_of("energy", 4096, 0.5),
        "energy, 10 min": job_of("energy", 4096, 1 / 6),
        "energy, 8 min": job_of("energy", 4096, 8 / 60),
        "time": job_of("time", 4096, None),
        "energy, auto, 30 min": job_of("energy", "auto", 0.5),
    }
    if chosen.jobs:
        jobs = {name: jobs[name] for name in chosen.jobs.split(",")}
    taken: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    solved: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    plans: dict[tuple[str, int, str], Plan] = {}
    work = [(key, job) for key in pools for job in jobs] * chosen.rounds
    random.Random(0).shuffle(work)
    for (name, count), job in work:
        pool, types = pools[name, count]
        devices = pool.devices()
        estimate = estimate_for(devices, types, seed=types)
        began = time.process_time()
        try:
            plan = plans[name, count, job] = make_plan(
                jobs[job], pool, estimate, data_of(1_200_000), devices
            )
            solved[name, count, job].append(plan.solve_time_s)
        except Exception as error:  # noqa: BLE001 - an infeasible plan is timed too
            print(name, job, str(error)[:200])
        taken[name, count, job].append(time.process_time() - began)
    columns = f"{'median s':>9} {'spread':>7} {'solved s':>8} {'gap':>9}"
    print(f"{'pool':38} {'job':22} {columns}  devices, batch, front")
    for key in sorted(taken, key=lambda key: (key[2], key[0].split()[1], key[1])):
        times, found = taken[key], plans.get(key)
        spread = (max(times) - min(times)) / statistics.median(times)
        answer = "infeasible"
        if found:
            answer = f"{statistics.median(solved[key]):8.3f} {found.gap:9.2e}  "
            answer += f"{len(found.devices)}, {found.global_batch_size}, {len(found.front)}"
        print(f"{key[0]:38} {key[2]:22} {statistics.median(times):9.3f} {spread:7.0%} {answer}")


if __name__ == "__main__":
    main()
