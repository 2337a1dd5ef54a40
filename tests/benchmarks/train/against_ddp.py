"""Overhead over plain torch.nn.parallel.DistributedDataParallel: the same job on two ranks.

    python tests/benchmarks/train/against_ddp.py [--width 512] [--batch 64] [--steps 150]
        [--rounds 5] [--backend torch]

Both use the same model, order of rows, even split, optimizer, Gloo, and one thread per rank. DDP's
loop only trains; trainwright's also records, reports progress, monitors its ranks, and validates
18 rows after each epoch. Each round runs trainwright once and DDP twice, in random order; the
difference of the two DDP runs is the noise floor. The bar is 1.05.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pace import HELD_OUT, MODEL, ROWS, TRAIN_ROWS, asked_for, middle, paced, samples_per_s

from trainwright.tasks.train.batch.sampling import samples_after

RANKS = 2


def ours(width: int, batch: int, steps: int, backend: str) -> float:
    """Samples per second of trainwright."""
    with tempfile.TemporaryDirectory() as folder:
        split = [batch] * RANKS
        asked = asked_for(
            Path(folder), split, [{"type": "cpu"}] * RANKS, steps, width=width, backend=backend
        )
        seen, _ = paced(asked)
    return samples_per_s(seen, sum(split), after=20)


def ddp(width: int, batch: int, steps: int) -> float:
    """Samples per second of DDP."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--as-rank"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen(
                [*command, str(rank), folder, str(width), str(batch), str(steps)], env=environment
            )
            for rank in range(RANKS)
        ]
        ended = [rank.wait() for rank in ranks]
        if any(ended):
            raise RuntimeError("a rank of the DDP training failed")
        return float(json.loads((Path(folder) / "rate").read_text()))


def as_rank(rank: int, folder: str, width: int, batch: int, steps: int) -> None:
    """Train as one rank of DDP."""
    import torch
    import torch.distributed as dist

    from trainwright.tasks.data import dataset as data
    from trainwright.tasks.spec.data_spec import DataSpec
    from trainwright.tasks.train.batch.sampling import epoch_order

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS
    )
    dataset = data.load(
        DataSpec.model_validate({"uri": "builtin:digits", "validation_fraction": HELD_OUT / ROWS})
    )
    rows = dataset.split.train
    inputs, targets = (
        torch.from_numpy(dataset.inputs["inputs"]).float(),
        torch.from_numpy(dataset.targets),
    )
    names: dict = {}
    exec(MODEL, names)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(names["build_model"](width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)
    size, step, began, first = batch * RANKS, 0, 0.0, 20
    per_epoch = -(-TRAIN_ROWS // size)
    for epoch in range(-(-steps * size // TRAIN_ROWS)):
        order = torch.as_tensor(epoch_order(rows, 0, epoch))
        for at in range(0, TRAIN_ROWS, size):
            if step == first:
                began = time.perf_counter()
            index = order[at : at + size].chunk(RANKS)[rank]
            optimizer.zero_grad(set_to_none=True)
            torch.nn.functional.cross_entropy(model(inputs[index]), targets[index]).backward()
            optimizer.step()
            step += 1
    taken = time.perf_counter() - began
    assert step % per_epoch == 0
    if rank == 0:
        done = samples_after(step, TRAIN_ROWS, size) - samples_after(first, TRAIN_ROWS, size)
        (Path(folder) / "rate").write_text(json.dumps(done / taken))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Measure, and print the ratio."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=64, help="of each rank")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--backend", default="torch")
    asked = parser.parse_args()
    found: dict[str, list[float]] = {"ours": [], "ddp": [], "again": []}
    for _ in range(asked.rounds):
        for way in random.sample(sorted(found), len(found)):
            job = asked.width, asked.batch, asked.steps
            found[way].append(ours(*job, asked.backend) if way == "ours" else ddp(*job))
    ratios = [
        (one + other) / 2 / mine
        for one, other, mine in zip(found["ddp"], found["again"], found["ours"], strict=True)
    ]
    floor = statistics.median(
        abs(a / b - 1) for a, b in zip(found["ddp"], found["again"], strict=True)
    )
    step_ms = 1e3 * RANKS * asked.batch / statistics.median(found["ddp"] + found["again"])
    print(
        f"width {asked.width}, {RANKS} ranks of {asked.batch}, {asked.backend}: {middle(ratios)} "
        f"of DDP's time (bar 1.05), which is {step_ms:.1f} ms per step; noise floor {floor:.3f} "
        f"over {asked.rounds} rounds",
        flush=True,
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-rank"]:
        as_rank(int(sys.argv[2]), sys.argv[3], *(int(one) for one in sys.argv[4:7]))
    else:
        main()
