"""Measures how much longer a rank's training step takes because a sum with another came before."""

from __future__ import annotations

import statistics
import time

_ROUNDS, _STEPS = 12, 10
_BATCH, _CHANNELS, _SIZE = 32, 64, 8


def measure_after_sum(rank: int) -> float:
    """Seconds by which a step takes longer after a sum, on rank 0; 0 on the other rank.

    The time hardly depends on the step's length. Probable causes: a rank that waits for a sum lets
    others use its core, so the next step starts with cold caches, and threads that sum interrupt
    it.

    Both ranks call this, in a process group of two. Rounds alternate: rank 0 steps while rank 1
    waits, then both step and sum their gradients; only steps are timed. The result is the median of
    the rounds' differences, because the machine's own speed drifts between rounds.
    """
    import torch
    import torch.distributed as dist

    from trainwright.estimator.trace.training_step import uncompiled

    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, _CHANNELS, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(_CHANNELS, _CHANNELS, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(_CHANNELS * _SIZE**2, 10),
    )
    optimizer = uncompiled(torch.optim.AdamW)(model.parameters())  # as ranks do
    inputs, targets = torch.randn(_BATCH, 1, _SIZE, _SIZE), torch.randint(0, 10, (_BATCH,))

    def step() -> float:
        started = time.perf_counter()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        return time.perf_counter() - started

    def step_and_sum() -> float:
        took = step()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        return took

    step()
    differences = []
    for _ in range(_ROUNDS):
        dist.barrier()
        alone = [step() for _ in range(_STEPS)] if rank == 0 else [0.0]
        dist.barrier()
        together = [step_and_sum() for _ in range(_STEPS)]
        differences.append(statistics.median(together) - statistics.median(alone))
    return max(0.0, statistics.median(differences)) if rank == 0 else 0.0
