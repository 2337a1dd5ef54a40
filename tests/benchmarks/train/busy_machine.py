"""How fast a training is beside a program of low priority that keeps all cores busy.

    python tests/benchmarks/train/busy_machine.py [ROUNDS] [--places PLACE ...]

Each round (default 5) trains a small network alone and beside two busy threads at nice 10, in
turn, in each place: on devices of 2, 1 and 0.5 cores of this machine, or on one of a core on a host
by podman or in Slurm's queue (in network namespaces; these need root). Printed: the median of a
step's seconds, and the median and range of the ratio of the speeds, round by round. The noise is
the ratio of the speeds alone between neighbouring rounds. The bar is 0.6.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))
sys.path.extend(
    str(Path(__file__).parents[2] / "tasks" / "train" / room) for room in ("", "hosts", "rank")
)

import lab
import slurm_lab
from container_case import contain
from hosts import steps_of
from hosts_case import on_hosts
from slurm_case import on_slurm
from training_case import request

from trainwright.tasks.train import TrainRequest, train

BAR = 0.6
CORES = {"2 cores": 2.0, "1 core": 1.0, "0.5 cores": 0.5}
PLACES = (*CORES, "podman", "slurm")
BATCH, EPOCHS, SETTLING = 256, 120, 60
MODEL = """
from torch import nn


def build_model():
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 512),
        nn.ReLU(),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )
"""
BUSY = """
import os, torch
os.nice(10)
torch.set_num_threads(2)
matrix = torch.randn(1500, 1500)
print("busy", flush=True)
while True:
    matrix @ matrix
"""


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """Two busy threads at nice 10."""
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(1)
        try:
            yield
        finally:
            process.kill()


@contextlib.contextmanager
def asked_for(place: str, folder: Path) -> Iterator[TrainRequest]:
    """A training in a place."""
    wanted = {"backend": "torch", "epochs": EPOCHS, "checkpoint": {"every_steps": 10**6}}
    core = {"type": "cpu", "cores": 1.0, "speed": 1.0}
    if place in CORES:
        device = {"type": "cpu", "cores": CORES[place]}
        yield request(folder, [BATCH], devices=[device], **wanted)
    elif place == "podman":
        with lab.running(cores=[1.0], rate="1gbit") as made:
            asked = on_hosts(folder, made, [BATCH], core, **wanted)
            contain(asked, {"image": "/:O"})
            yield not_emulated(asked)
    else:
        with slurm_lab.running(hosts=1) as cluster:
            os.environ["SLURM_CONF"] = str(cluster.config)
            yield not_emulated(on_slurm(folder, cluster, [BATCH], core, **wanted))


def not_emulated(asked: TrainRequest) -> TrainRequest:
    """The training on devices that compute as fast as they can."""
    devices = [device.model_copy(update={"speed": None}) for device in asked.plan.devices]
    return asked.model_copy(update={"plan": asked.plan.model_copy(update={"devices": devices})})


def step_s(asked: TrainRequest) -> float:
    """Train; the mean seconds of a step once it is under way."""
    (Path(asked.source_folder) / "net.py").write_text(MODEL)
    train(asked)
    steps = [own[0]["step_time_s"] for own in steps_of(asked, 1)]
    return statistics.fmean(steps[SETTLING:])


def main() -> int:
    """Measure and print; exit code 1 if the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rounds", type=int, nargs="?", default=5)
    parser.add_argument("--places", nargs="+", default=list(CORES), choices=PLACES)
    given = parser.parse_args()
    alone, beside = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for _ in range(given.rounds):
        for place in given.places:
            for seconds, program in ((alone, contextlib.nullcontext), (beside, busy)):
                with (
                    tempfile.TemporaryDirectory() as name,
                    asked_for(place, Path(name)) as asked,
                    program(),
                ):
                    seconds[place].append(step_s(asked))
            print(f"{place}: {alone[place][-1]:.4f} s, {beside[place][-1]:.4f} s", flush=True)
    met = True
    for place in given.places:
        ratios = [one / two for one, two in zip(alone[place], beside[place], strict=True)]
        noise = [one / two for one, two in pairwise(alone[place])] or [1.0]
        met &= min(ratios) >= BAR
        print(
            f"{place}: a step takes {1e3 * statistics.median(alone[place]):.2f} ms alone, "
            f"{1e3 * statistics.median(beside[place]):.2f} ms beside; speed "
            f"{statistics.median(ratios):.2f} of its own ({min(ratios):.2f} to {max(ratios):.2f}; "
            f"noise {min(noise):.2f} to {max(noise):.2f}); bar {BAR:g}: "
            f"{'met' if min(ratios) >= BAR else 'MISSED'}"
        )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
