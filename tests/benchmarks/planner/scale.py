"""Measures planning time for growing pools.

    python tests/benchmarks/planner/scale.py [--rounds N] [--jobs A,B] [--largest-only] [--figure F]

Pools of 8 types on hosts of 8 devices (of one type each, or mixed), up to 10,000 devices; and up to
100 types of 100 devices each. Time is CPU time of `make_plan`, alternatives and front included.
Rounds are interleaved in random order, and the spread between them is the noise. `solved` is the
wall time until the search found the plan. The gap is the search's bound: 0 is exact.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import subprocess
import time
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path

from planner_cases import data_of

from trainwright.estimator.curves import Affine, DeviceCurve
from trainwright.tasks.allocate.planner import make_plan
from trainwright.tasks.runs.artefacts import Estimate, Plan
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
    parser.add_argument("--figure", type=Path)
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
    if chosen.figure:
        chosen.figure.write_text(drawn(taken))


def commit() -> str:
    """The measured commit."""
    words = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return f"commit {done.stdout.strip()}"


def drawn(taken: dict[tuple[str, int, str], list[float]]) -> str:
    """Median seconds over devices, one line per job and kind of pool: SVG, logarithmic axes."""
    lines: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for (name, count, job), times in taken.items():
        kind = "mixed hosts" if "mixed" in name else "8 types"
        if "types of" in name:
            kind = "types of 100"
        lines[f"{job}: {kind}"].append((count, statistics.median(times)))
    colours = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")

    def place(count: float, seconds: float) -> tuple[float, float]:
        return 60 + 500 * (math.log10(count) - 1) / 3, 320 - 280 * (math.log10(seconds) + 3) / 4

    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 370" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="860" height="370" fill="white"/>',
    ]
    for decade in range(-3, 2):
        _, y = place(10, 10.0**decade)
        parts.append(f'<line x1="60" x2="560" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="10" y="{y + 4}">{10.0**decade:g} s</text>')
    for decade in range(1, 5):
        x, _ = place(10.0**decade, 1)
        parts.append(f'<line x1="{x}" x2="{x}" y1="40" y2="320" stroke="#ddd"/>')
        parts.append(f'<text x="{x - 10}" y="336">{10**decade}</text>')
    title = f"make_plan, CPU time, median of the rounds; {datetime.now(UTC):%Y-%m-%d}, {commit()}"
    parts.append('<text x="270" y="356">devices in the pool</text>')
    parts.append(f'<text x="60" y="24">{title}</text>')
    for number, (name, points) in enumerate(sorted(lines.items())):
        colour = colours[number % len(colours)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in sorted(points)))
        dash = "" if number < len(colours) else ' stroke-dasharray="4 3"'
        line = f'fill="none" stroke="{colour}" stroke-width="1.6"{dash}'
        parts.append(f'<polyline points="{path}" {line}/>')
        parts.append(f'<text x="580" y="{52 + 16 * number}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>"])


if __name__ == "__main__":
    main()
