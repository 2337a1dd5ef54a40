"""Measures the resident memory of real trainings: `python resident.py` answers lines with JSON.

A line names a case: FAMILY SEED NUMBER BATCH_SIZE, and `rank` if it should map and keep memory as
ranks do. Each case runs in a process that is forked from this one after importing torch. It first
trains a tiny model to finish torch's own start-up; the resident memory then is the baseline. Then
it builds the case's model and runs steps. The result is the kernel's maximum since (VmHWM, reset by
/proc/self/clear_refs) minus the baseline: after three steps, and after six (20 steps hold some 3 %
more). It also reports the growth of malloc's used memory between steps, tensors included, and the
page faults of a later step.

`python resident.py FAMILY SEED NUMBER BATCH_SIZE [rank]` measures a case in this process.
"""

from __future__ import annotations

import ctypes
import gc
import json
import multiprocessing
import resource
import sys
from itertools import islice
from pathlib import Path

import torch
import torch._dynamo  # the first optimizer of a process imports this
from zoo import Case, cases

from trainwright.estimator.measure.networks.benchmark import networks
from trainwright.estimator.memory.freed_memory import keep_freed_memory, map_blocks
from trainwright.estimator.trace.source import ModelDefinition
from trainwright.estimator.trace.training_step import TrainingStep, TrainingStepSpec, prepare

STEPS, MORE_STEPS = 3, 6


def case_of(family: str, seed: int, number: int) -> Case:
    """The case of this number, of the `zoo` or of calibration's `networks`."""
    if family == "zoo":
        return cases(seed, number + 1)[number]
    one = next(islice(networks(seed), number, None))
    return Case(
        one.family,
        str(number),
        one.build,
        one.example_batch,
        one.loss,
        one.batch_size,
        one.optimizer,
    )


def status(field: str) -> int:
    """Resident bytes of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


class Mallinfo2(ctypes.Structure):
    """malloc.h's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


def in_use() -> int:
    """Bytes in use according to malloc, on the heap and mapped."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Mallinfo2
    said = mallinfo2()
    return int(said.uordblks + said.hblkhd)


def warm_up() -> None:
    """Train a tiny model once, to finish torch's own start-up."""
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 2)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(2, 3, 8, 8)).square().mean().backward()
    optimizer.step()


def train(case: Case, batch_size: int, *, rank: bool = False) -> TrainingStep:
    """Build the case's model and run the first steps; `rank` keeps memory freed after the first."""
    torch.manual_seed(0)
    definition = ModelDefinition(case.build, case.example_batch, case.loss)
    step = prepare(
        TrainingStepSpec(definition, {}, None, {"name": case.optimizer}), case.build(), batch_size
    )
    step()
    if rank:
        keep_freed_memory()
    for _ in range(STEPS - 1):
        step()
    return step


def measured(
    family: str, seed: int, number: int, batch_size: int, *, rank: bool = False
) -> dict[str, int]:
    """Bytes of one case in this process; with `rank`, it maps and keeps memory like our ranks."""
    if rank:
        map_blocks()
    case = case_of(family, seed, number)
    torch.set_num_threads(1)
    warm_up()
    gc.collect()
    baseline, files, used = status("VmRSS"), status("RssFile"), in_use()
    Path("/proc/self/clear_refs").write_text("5")
    kept = train(case, batch_size, rank=rank)
    found = {"high_bytes": status("VmHWM") - baseline}
    for _ in range(MORE_STEPS - STEPS):
        kept()
    found |= {
        "later_high_bytes": status("VmHWM") - baseline,
        "file_bytes": status("RssFile") - files,
    }
    gc.collect()
    found["in_use_bytes"] = in_use() - used
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    kept()
    return {**found, "faults": resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before}


def show(family: str, seed: str, number: str, batch_size: str, process: str = "plain") -> None:
    """Measure one case in this process, and print it."""
    found = measured(family, int(seed), int(number), int(batch_size), rank=process == "rank")
    print(json.dumps(found), flush=True)


def main() -> None:
    """Measure one case, or the requested ones."""
    if len(sys.argv) > 1:
        show(*sys.argv[1:])
        return
    for line in sys.stdin:
        child = multiprocessing.get_context("fork").Process(target=show, args=line.split())
        child.start()
        child.join()
        if child.exitcode:
            raise SystemExit(f"resident: {line.strip()} failed")


if __name__ == "__main__":
    main()
