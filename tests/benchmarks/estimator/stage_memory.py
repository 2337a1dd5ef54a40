"""Memory of pipelines' stages: `python tests/benchmarks/estimator/stage_memory.py [--cases N] …`.

Held-out families, cut into stages of about the same number of units. Each stage runs steps as a
rank does (`StageStep`, sums of gradients, optimizer), with messages of the right shape from a
stand-in for the other ranks. The peak of torch's CPU allocator in the third step against the
simulated one.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from allocator import peak_of
from recompute_figures import transformer
from torch.utils._pytree import tree_map
from zoo import Case, cases

from trainwright.estimator.trace.cuts.forward_graph import TensorFacts
from trainwright.estimator.trace.cuts.model_cuts import CutModel, cut_step
from trainwright.estimator.trace.trace import trace
from trainwright.tasks.allocate.layouts.choose import micro_batches
from trainwright.tasks.allocate.layouts.memory import MOMENTS
from trainwright.tasks.allocate.pipelines.stage_peaks import StagePeaks, StageWorkload
from trainwright.tasks.runs.artefacts.layout import StageSchedule
from trainwright.tasks.spec.train_spec import Optimizer
from trainwright.tasks.train.layouts.gradients import GradientSum
from trainwright.tasks.train.pipeline.deferred_weights import DeferredWeights
from trainwright.tasks.train.pipeline.stage_model import StageModel
from trainwright.tasks.train.pipeline.stage_step import MicroBatch, StagePlace, StageStep
from trainwright.tasks.train.rank.optimizer import make_optimizer

SCHEDULES: tuple[StageSchedule, ...] = ("gpipe", "1f1b", "zero-bubble")


class OtherRanks:
    """Stands in for the ranks beside a stage: what it receives has the right shape."""

    rank, size = 0, 1

    def __init__(self, stage: StageModel, samples: Sequence[int]) -> None:
        self._stage, self._samples = stage, samples
        self._ahead: dict[int, list[torch.Tensor]] = {}

    def start_send(self, *_: Any) -> None:
        """Nothing: what is sent has left."""

    start_sum = finish = start_send

    def receive(self, _: int, name: str) -> list[torch.Tensor]:
        """Random activations or gradients; the next activations come meanwhile."""
        number = int(name.rpartition(" ")[2])
        if not name.startswith("activations"):
            return self._message(self._stage.sends, number)
        found = self._ahead.pop(number, None) or self._message(self._stage.receives, number)
        if number + 1 < len(self._samples):
            self._ahead[number + 1] = self._message(self._stage.receives, number + 1)
        return found

    def _message(self, facts: Sequence[TensorFacts], number: int) -> list[torch.Tensor]:
        found = []
        for one in facts:
            shape = [one.shape_of(self._samples[number])[place] for place in one.order]
            real = one.dtype.is_floating_point
            make: Any = torch.randn if real else torch.zeros
            found.append(make(shape, dtype=one.dtype))
        return found


def run_stage(case: Case, cut: CutModel, what: StageWorkload, names: Sequence[str]) -> Any:
    """A function that does a step of a stage."""
    torch.manual_seed(0)
    model = case.build().train()
    stage = StageModel(model, cut, what.first, what.end, names)
    for name, one in model.named_parameters():
        if name not in stage.parameters:
            one.data = one.data[:0].clone() if one.dim() else one.data
    own = [one for one in stage.parameters.values() if one.requires_grad]
    optimizer = make_optimizer(own, Optimizer(name=case.optimizer), 1e-4)
    exchange: Any = OtherRanks(stage, what.micro_batches)
    sums = GradientSum(own, exchange)
    before, after = what.stage - 1, what.stage + 1
    place = StagePlace(
        0,
        what.stage,
        what.stages,
        before if what.stage else None,
        after if after < what.stages else None,
    )
    step = StageStep(stage, place, what.schedule, exchange, torch.device("cpu"))
    if what.schedule == "zero-bubble":
        modules = dict(model.named_modules())
        used = {one.rpartition(".")[0] for one in stage.parameters}
        step.deferred = DeferredWeights({one: modules[one] for one in used}, sums.arrived)
    total = sum(what.micro_batches)
    rows = case.example_batch(total) if stage.is_first or stage.is_last else None

    def part(number: int) -> MicroBatch:
        begin, size = sum(what.micro_batches[:number]), what.micro_batches[number]

        def some(place: int) -> Any:
            assert rows is not None
            return tree_map(lambda one: one[begin : begin + size], rows[place])

        def loss(outputs: Any) -> torch.Tensor:
            return case.loss(outputs, some(1)) * (size / total)

        return MicroBatch(size, lambda: None, lambda: some(0), loss)

    parts = [part(number) for number in range(len(what.micro_batches))]

    def one_step() -> None:
        sums.begin()
        sums.last = False
        step.train(parts, contextlib.nullcontext, lambda _: setattr(sums, "last", True))
        sums.send_rest()
        sums.finish(sums.used)
        optimizer.step()

    return one_step


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=14, help="held-out models")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES, choices=SCHEDULES)
    parser.add_argument("--recompute", action="store_true", help="stages recompute each module")
    given = parser.parse_args()
    torch.set_num_threads(1)
    errors = []
    every = [transformer(8, 16), *cases(given.seed, given.cases)]
    for case in every:
        structure = trace(case.spec(), case.batch_size)
        recorded = structure.recorded_step()
        units = len(structure.units)
        if recorded is None or units < given.stages:
            print(f"{case.label:50} {structure.not_cut or 'has no recorded step'}")
            continue
        cut = cut_step(case.spec())
        peaks = StagePeaks(
            recorded,
            [one.facts() for one in structure.layer_work],
            structure.units,
            2 + MOMENTS[case.optimizer],
        )
        sizes = tuple(micro_batches(case.batch_size, min(given.micro_batches, case.batch_size)))
        for schedule in given.schedules:
            said = []
            for stage in range(given.stages):
                first, end = (units * one // given.stages for one in (stage, stage + 1))
                what = StageWorkload(first, end, schedule, stage, given.stages, sizes)
                names = []
                if given.recompute:
                    names = [one for unit in structure.units[first:end] for one in unit.modules]
                planned = peaks.peak_bytes(what, "cpu", names) + peaks.parameter_bytes(first, end)
                gc.collect()
                measured = peak_of(partial(run_stage, case, cut, what, names))
                errors.append(abs(planned / measured - 1))
                said.append(f"{measured / 2**20:.1f} MiB {planned / measured - 1:+.1%}")
            print(f"{case.label:50} {schedule:11} {', '.join(said)}", flush=True)
    errors.sort()
    tenth = errors[min(len(errors) - 1, int(0.9 * len(errors)))]
    print(
        f"{len(errors)} stages: planned peak, median error {statistics.median(errors):.2%}, p90 "
        f"{tenth:.2%}, worst {errors[-1]:.2%}"
    )


if __name__ == "__main__":
    main()
