"""How much of the gradients' communication is hidden behind the backward pass.

    python tests/benchmarks/train/overlap.py [--rate 200mbit] [--blocks 5] [--chunks 4096 1024 …]
        [--backends torch horovod] [--megabytes 16]

Two ranks on the two hosts of a lab (`tests/lab.py`, needs root) with a slow link. Their layers
sleep, so that ranks and their communication threads don't compete for cores; gradients, chunks and
sums are those of a training. Measured in turns in each block: a step without sums (compute), the
sums of all chunks at once (wire), and a step. No step is shorter than the best one, in which each
layer's gradient is on the wire as soon as its backward pass has ended and the wire is free:

    best      max over layers l of (end of l's backward pass + wire time of l and all layers before)

Printed by case and chunk size, medians and ranges:

    exposed   (step − best) / (compute + wire − best), of what could be hidden; the bar is 15 %
    of bar    step / (1.08 · max(compute, wire) + wire of one chunk); the bar is 1
    (best)    the same of the best step: above 1, no order of sending reaches the bar
    to 4 MiB  step / step with chunks of 4 MiB, the fixed size; the bar is 1
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from trainwright.estimator.predict.communication import GRADIENT_BUCKET_BYTES
from trainwright.tasks.train.exchange.peers import Peers
from trainwright.tasks.train.exchange.rendezvous import Rendezvous
from trainwright.tasks.train.layouts.gradients import GradientSum
from trainwright.tasks.train.worker_group import WorkerGroup

LAYERS = 16
FORWARD = 1 / 3
"""the share of a step's computation"""
MODELS = {
    # The share of each layer in the parameters: all alike; half of them in the last layer, as of a
    # convolutional network with a dense head; half of them in the first, as of embeddings.
    "even": [1 / LAYERS] * LAYERS,
    "head": [0.5 / (LAYERS - 1)] * (LAYERS - 1) + [0.5],
    "table": [0.5] + [0.5 / (LAYERS - 1)] * (LAYERS - 1),
}
SPEEDS = {"computes twice as long": 2.0, "as long": 1.0, "a quarter": 0.25}
"""computation, as a share of the time on the wire"""


class Sleeping(torch.autograd.Function):
    """A layer that sleeps instead of computing."""

    @staticmethod
    def forward(ctx: Any, rows: Any, weight: Any, forward_s: float, backward_s: float) -> Any:
        ctx.gradient, ctx.backward_s = weight, backward_s
        time.sleep(forward_s)
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        time.sleep(ctx.backward_s)
        return gradients[0], ctx.gradient.detach().clone(), None, None


class Case:
    """A model of sleeping layers, whose step computes for `compute_s`."""

    def __init__(self, model: str, elements: int, compute_s: float) -> None:
        counts = [max(1, round(share * elements)) for share in MODELS[model]]
        self.weights = [torch.nn.Parameter(torch.ones(count)) for count in counts]
        self.forward_s = FORWARD * compute_s / LAYERS
        self.backward_s = (1 - FORWARD) * compute_s / LAYERS

    def passes(self) -> None:
        rows = torch.zeros(1, requires_grad=True)
        for weight in self.weights:
            rows = Sleeping.apply(rows, weight, self.forward_s, self.backward_s)
        rows.sum().backward()


def rank(number: int, backend: Any, meeting: str, machines: list[str], asked: Any) -> None:
    """One rank; the first one prints a line of JSON for each measurement."""
    torch.set_num_threads(1)
    peers = Peers(backend)
    peers.join(
        WorkerGroup(generation=1, members=[0, 1], machines=machines, rendezvous=meeting), number
    )
    elements = round(asked.megabytes * 1e6 / 4)
    link_s = asked.megabytes / asked.mb_per_s

    def timed(work: Any) -> float:
        peers.sum_(torch.zeros(1), "begin")
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    for block in range(-1, asked.blocks):  # the first one warms up
        for model in asked.models:
            for speed, share in SPEEDS.items():
                for kilobytes in asked.chunks:
                    case = Case(model, elements, share * link_s)
                    size = kilobytes << 10
                    gradients = GradientSum(case.weights, peers, size)

                    def whole(case: Case = case, gradients: GradientSum = gradients) -> None:
                        gradients.begin()
                        case.passes()
                        gradients.send_rest()
                        gradients.finish([1.0] * len(gradients.used))

                    def wire(gradients: GradientSum = gradients) -> None:
                        gradients.begin()
                        gradients.send_rest()
                        gradients.finish([1.0] * len(gradients.used))

                    alone = Case(model, elements, share * link_s)
                    found = {
                        "compute": timed(alone.passes),
                        "wire": timed(wire),
                        "step": timed(whole),
                    }
                    gc.collect()  # parameters and their hooks refer to each other
                    if number == 0 and block >= 0:
                        print(json.dumps([backend, model, speed, kilobytes, found]), flush=True)
    peers.shutdown()


def measured(made: Any, backend: Any, asked: argparse.Namespace) -> list[Any]:
    """What the first of two ranks on the hosts prints."""
    addresses = [host.address for host in made.hosts]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "logs").mkdir()
        meet = Rendezvous(backend, Path(folder), made.driver, set(addresses))
        meeting = meet.open(1, addresses)
        options = ["--blocks", str(asked.blocks), "--megabytes", str(asked.megabytes)]
        options += ["--chunks", *map(str, asked.chunks), "--models", *asked.models]
        options += ["--mb-per-s", str(asked.mb_per_s)]
        ranks = []
        for number, host in enumerate(made.hosts):
            command = [str(host.python), __file__, *options, "--rank", str(number)]
            command += ["--backends", backend, "--meeting", meeting, "--machines", *addresses]
            ranks.append(
                subprocess.Popen(
                    host.inside(*command),
                    stdout=subprocess.PIPE,
                    text=True,
                    env={
                        **os.environ,
                        "GLOO_SOCKET_IFNAME": "eth0",
                        "TRAINWRIGHT_ADDRESS": host.address,
                        "OMP_NUM_THREADS": "1",
                    },
                )
            )
        try:
            printed = [one.communicate(timeout=3600)[0] for one in ranks]
        finally:
            for one in ranks:
                one.kill()
            meet.close()
    return [json.loads(line) for line in printed[0].splitlines()]


def best_s(model: str, compute_s: float, wire_s: float) -> float:
    """The shortest step."""
    shares, backward_s = MODELS[model], (1 - FORWARD) * compute_s / LAYERS
    return max(
        compute_s - number * backward_s + wire_s * sum(shares[: number + 1])
        for number in range(LAYERS)
    )


def report(rows: list[Any]) -> None:
    """A line for each backend, model, speed and chunk size."""
    cases: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for backend, model, speed, kilobytes, found in rows:
        best = best_s(model, found["compute"], found["wire"])
        chunk_s = found["wire"] * min(1.0, kilobytes / found["kilobytes"])
        bar = 1.08 * max(found["compute"], found["wire"]) + chunk_s
        hidden = found["compute"] + found["wire"] - best
        one = cases.setdefault((backend, model, speed, kilobytes), {})
        for name, value in {
            **found,
            "exposed": (found["step"] - best) / hidden,
            "of bar": found["step"] / bar,
            "best": best / bar,
        }.items():
            one.setdefault(name, []).append(value)
    print(
        f"{'backend':8} {'model':6} {'computation':23} {'chunk, KiB':>10} {'compute':>8} "
        f"{'wire':>7} {'step, s':>8} {'range':>13} {'exposed':>8} {'of bar':>7} {'(best)':>7} "
        f"{'to 4 MiB':>9}"
    )
    for (backend, model, speed, kilobytes), one in cases.items():
        steps = one["step"]
        fixed = cases.get((backend, model, speed, GRADIENT_BUCKET_BYTES >> 10), one)["step"]
        ratio = statistics.median(a / b for a, b in zip(steps, fixed, strict=True))
        print(
            f"{backend:8} {model:6} {speed:23} {kilobytes:10} "
            f"{statistics.median(one['compute']):8.2f} {statistics.median(one['wire']):7.2f} "
            f"{statistics.median(steps):8.2f} {f'{min(steps):.2f} to {max(steps):.2f}':>13} "
            f"{100 * statistics.median(one['exposed']):6.0f} % "
            f"{statistics.median(one['of bar']):7.2f} {statistics.median(one['best']):7.2f} "
            f"{ratio:9.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="200mbit", help="each host's link (tc syntax)")
    parser.add_argument("--mb-per-s", type=float, default=24.0, help="what the link carries")
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--megabytes", type=float, default=16.0, help="of gradients")
    parser.add_argument("--chunks", type=int, nargs="+", default=[4096, 1024, 256], help="KiB")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--backends", nargs="+", default=["torch", "horovod"])
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meeting", help=argparse.SUPPRESS)
    parser.add_argument("--machines", nargs="+", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank is not None:
        rank(asked.rank, asked.backends[0], asked.meeting, asked.machines, asked)
        return
    import lab

    rows = []
    with lab.running(cores=[None, None], rate=asked.rate) as made:
        for backend in asked.backends:
            rows += measured(made, backend, asked)
    for row in rows:
        row[-1]["kilobytes"] = asked.megabytes * 1e6 / 1024
    report(rows)


if __name__ == "__main__":
    main()
