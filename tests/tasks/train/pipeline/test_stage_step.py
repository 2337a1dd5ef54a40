"""Stages on threads that send each other messages make the gradients of one process."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from cut_families import FAMILIES, cut_model
from layout_ranks import ThreadExchange, Threads
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from trainwright.estimator.trace.cuts.model_cuts import CutModel
from trainwright.tasks.runs.artefacts.layout import StageSchedule
from trainwright.tasks.train.passes import keyed_dropout
from trainwright.tasks.train.pipeline.deferred_weights import DeferredWeights
from trainwright.tasks.train.pipeline.stage_model import StageModel
from trainwright.tasks.train.pipeline.stage_step import MicroBatch, StagePlace, StageStep

SIZES = [3, 2, 4, 3, 1]
"""Samples of the micro-batches."""
STEP = (7, 3)
SCHEDULES: tuple[StageSchedule, ...] = ("gpipe", "1f1b", "zero-bubble")


pytestmark = pytest.mark.usefixtures("doubles")


def loss_of(outputs: Any) -> torch.Tensor:
    made = [one for one in tree_flatten(outputs)[0] if one.requires_grad]
    return sum(((one - 0.1).square().mean() for one in made), torch.zeros(()))


def some(inputs: Any, begin: int, count: int) -> Any:
    """Rows [begin, begin + count) of inputs."""
    return tree_map(lambda one: one[begin : begin + count], inputs)


def stage_rank(
    original: nn.Module,
    found: CutModel,
    ends: list[int],
    rank: int,
    schedule: StageSchedule,
    exchange: ThreadExchange,
    inputs: Any,
    log: Callable[[str], None],
) -> tuple[StageModel, Any]:
    """One rank's step, then an evaluation of the first micro-batch."""
    stages, model = len(ends), copy.deepcopy(original).train()
    stage = StageModel(model, found, [0, *ends][rank], ends[rank])
    place = StagePlace(
        0, rank, stages, rank - 1 if rank else None, rank + 1 if rank + 1 < stages else None
    )
    step = StageStep(stage, place, schedule, exchange, torch.device("cpu"))
    if schedule == "zero-bubble":
        modules = dict(model.named_modules())
        own = {one.rpartition(".")[0] for one in stage.parameters}
        step.deferred = DeferredWeights(
            {name: modules[name] for name in own}, lambda parameter: log("arrived")
        )

    def micro_batch(number: int) -> MicroBatch:
        begin, size = sum(SIZES[:number]), SIZES[number]

        def start() -> None:
            keyed_dropout.begin_pass(*STEP, begin, size, stage.first_dropout)

        def loss(outputs: Any) -> torch.Tensor:
            log(f"loss {number}")
            return loss_of(outputs) * (size / sum(SIZES))

        return MicroBatch(size, start, lambda: some(inputs, begin, size), loss)

    parts = [micro_batch(number) for number in range(len(SIZES))]
    step.train(parts, contextlib.nullcontext, lambda _: log("last"))
    if step.deferred is not None:
        step.deferred.release()
    model.eval()
    return stage, step.evaluate(parts[0], 0, contextlib.nullcontext)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "family", ["U-Net", "GPT with tied embedding", "encoder and decoder", "ResNet"]
)
def test_gradients_are_those_of_one_process(
    family: str, schedule: StageSchedule, tmp_path: Path
) -> None:
    original, found = cut_model(family)
    inputs = FAMILIES[family][1](sum(SIZES))
    count = len(found.units)
    ends = [count // 3, 2 * count // 3, count]
    whole = copy.deepcopy(original).train()
    begin = 0
    for size in SIZES:
        keyed_dropout.begin_pass(*STEP, begin, size)
        (loss_of(whole(some(inputs, begin, size))) * (size / sum(SIZES))).backward()
        begin += size
    keyed_dropout.end_pass()

    threads, said = Threads(3), list[tuple[int, str]]()
    lock = threading.Lock()

    def run(rank: int) -> tuple[StageModel, Any]:
        keyed_dropout.install()
        exchange = ThreadExchange(rank, threads, tmp_path / "store")

        def log(what: str) -> None:
            with lock:
                said.append((rank, what))

        try:
            return stage_rank(original, found, ends, rank, schedule, exchange, inputs, log)
        finally:
            exchange.shutdown()

    with ThreadPoolExecutor(3) as pool:
        ran = list(pool.map(run, range(3)))

    sums: dict[str, torch.Tensor] = {}
    for stage, _ in ran:
        for name, one in stage.parameters.items():
            if one.grad is not None:
                sums[name] = sums[name] + one.grad if name in sums else one.grad
    for name, one in whole.named_parameters():
        assert (one.grad is None) == (name not in sums)
        if one.grad is not None:
            torch.testing.assert_close(sums[name], one.grad, rtol=1e-9, atol=1e-12)
    for name, buffer in whole.named_buffers():
        holder = next(stage for stage, _ in ran if name in stage.buffers)
        torch.testing.assert_close(holder.buffers[name], buffer, rtol=1e-12, atol=0)
    whole.eval()
    with torch.no_grad():
        expected = whole(some(inputs, 0, SIZES[0]))
    torch.testing.assert_close(ran[2][1], expected)
    assert [ran[rank][1] for rank in (0, 1)] == [None, None]
    assert [what for rank, what in said if rank == 2 and what.startswith("loss")] == [
        f"loss {number}" for number in range(len(SIZES))
    ]
    assert sum(what == "last" for _, what in said) == 3
    assert any(what == "arrived" for _, what in said) == (schedule == "zero-bubble")
