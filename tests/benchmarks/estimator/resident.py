"""The memory that real training processes hold: `python resident.py FAMILY SEED NUMBER BATCH_SIZE` prints one case as JSON.

A process of its own for each case: torch is imported, a tiny model trained, and the resident memory then read is the baseline.
Then the model is built and steps three times; what the kernel says was the most resident since (VmHWM, reset by
/proc/self/clear_refs) less the baseline is what the model's training takes.
"""

from __future__ import annotations

import gc
import json
import sys
from itertools import islice
from pathlib import Path

import torch
from zoo import Case, cases

from trainwright.estimator.benchmark import networks
from trainwright.estimator.source import ModelDefinition
from trainwright.estimator.training_step import StepSpec, TrainingStep, prepare

STEPS = 3


def case_of(family: str, seed: int, number: int) -> Case:
    """The case of this number among the zoo's (`zoo`) or the networks that calibration trains (`networks`)."""
    if family == "zoo":
        return cases(seed, number + 1)[number]
    one = next(islice(networks(seed), number, None))
    return Case(one.family, str(number), one.build, one.example_batch, one.loss, one.batch_size, one.optimizer)


def status(field: str) -> int:
    """Bytes that the kernel accounts this process for."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def warm_up() -> None:
    """Train a tiny model once, so that torch's own start is over."""
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(2, 3, 8, 8)).square().mean().backward()
    optimizer.step()


def train(case: Case, batch_size: int) -> TrainingStep:
    """Build the case's model and do its steps."""
    torch.manual_seed(0)
    definition = ModelDefinition(case.build, case.example_batch, case.loss)
    step = prepare(StepSpec(definition, {}, None, {"name": case.optimizer}), case.build(), batch_size)
    for _ in range(STEPS):
        step()
    return step


def main() -> None:
    """Measure one case."""
    case, batch_size = case_of(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])), int(sys.argv[4])
    torch.set_num_threads(1)
    cold = status("VmRSS")
    warm_up()
    gc.collect()
    baseline = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    kept = train(case, batch_size)
    high = status("VmHWM")
    print(
        json.dumps(
            {"high_bytes": high - baseline, "high_cold_bytes": high - cold, "end_bytes": status("VmRSS") - baseline}
        )
    )
    del kept


if __name__ == "__main__":
    main()
