"""The passes of a rank that is a stage of a pipeline: in a step, and in validation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np  # noqa: TID253 - only ranks import this
import torch  # noqa: TID253

from trainwright.estimator.trace.layer_tracker import LOSS
from trainwright.tasks.allocate.actions.stage_parts import stage_parts
from trainwright.tasks.runs.artefacts.step_kinds import ComputeKind, PassKind
from trainwright.tasks.train.batch.sampling import shares
from trainwright.tasks.train.passes import keyed_dropout
from trainwright.tasks.train.passes.keyed_dropout import DropoutPass
from trainwright.tasks.train.passes.pass_sums import PassSums
from trainwright.tasks.train.pipeline.stage_shortage import stage_shortage
from trainwright.tasks.train.pipeline.stage_step import MicroBatch
from trainwright.tasks.train.pipeline.stage_work import StageWork

if TYPE_CHECKING:
    from trainwright.tasks.train.rank.batch_loader import BatchTensors
    from trainwright.tasks.train.rank.rank_passes import RankPasses


class StagePasses:
    """Runs a rank's stage on the samples of its pipeline."""

    def __init__(self, rank: RankPasses, work: StageWork) -> None:
        self._rank, self._work = rank, work
        self._sums = PassSums()
        self._layers = self._own_layers() if rank.emulated is not None else []

    def _own_layers(self) -> list[str]:
        """The layers of the stage but the loss: an emulated device has a time for each.

        Some are modules that never run there, as their operations stand in a unit. None if the plan
        has no units.
        """
        plan, layout = self._rank.request.plan, self._rank.layout
        if not plan.units:
            return []
        own = layout.devices.index(plan.devices[self._rank.number].id)
        held = stage_parts(layout, plan.layers, plan.units)[own].layers
        return [one.name for one in held if one.name != LOSS]

    def does_not_fit(self) -> str:
        """That the stage does not fit into memory, and what would take less."""
        rank = self._rank
        return stage_shortage(rank.layout, rank.request.plan.devices[rank.number].id)

    @property
    def counts(self) -> bool:
        """Whether this rank stands for its pipeline: the last stage, which knows the loss."""
        return self._work.stage.stage.is_last

    @property
    def reads_rows(self) -> bool:
        """Whether it needs inputs or targets: the first and the last stage do."""
        stage = self._work.stage.stage
        return stage.is_first or stage.is_last

    def micro_batches(self, rows: Any) -> list[Any]:
        """The rows of its pipeline in a step as micro-batches, in proportion to the planned ones.

        Some may be empty.
        """
        planned = self._work.micro_batches()
        sizes = shares(len(rows), planned if sum(planned) else [1])
        return np.split(rows, np.cumsum(sizes)[:-1])

    @property
    def divides_rows(self) -> bool:
        """Whether all pipelines must have the same passes, as they share rows of layers."""
        return self._work.divides_rows

    def train(
        self, parts: Sequence[Any], rows_of: Callable[[Any], BatchTensors], total: int
    ) -> PassSums:
        """Forward and backward passes over the micro-batches of a step.

        `parts` are places among the step's rows of the pipeline; `rows_of` gives those of one, any
        row for an empty one. The sums are 0 on all stages but the last.
        """
        self._sums = PassSums()
        gradients = self._work.gradients
        gradients.last = self._work.last = False

        def last_backward(kind: PassKind) -> None:
            gradients.last = self._work.last = True
            deferred = self._work.stage.deferred
            if kind == "weight-gradient" and deferred is not None:
                modules = deferred.modules
                gradients.backward_ended({id(one) for m in modules for one in m.parameters()})

        def passed(kind: PassKind, number: int) -> None:
            emulated, deferred = self._rank.emulated, self._work.stage.deferred
            if emulated is not None and kind == "weight-gradient" and deferred is not None:
                emulated.begin_part(len(parts[number]))
                emulated.later_weights(deferred.names)
            elif emulated is not None:
                for layer in self._layers:
                    emulated.forward(layer) if kind == "forward" else emulated.backward(layer)
            computed: ComputeKind = "forward" if kind == "forward" else "backward"
            self._rank.actions.done(computed, "exchange", (kind, number))

        micro_batches = [
            self._micro_batch(number, part, rows_of, total) for number, part in enumerate(parts)
        ]
        self._work.stage.train(micro_batches, self._mode, last_backward, passed)
        gradients.send_rest()
        self._work.send_rest()
        return self._sums

    def _micro_batch(
        self, number: int, part: Any, rows_of: Callable[[Any], BatchTensors], total: int
    ) -> MicroBatch:
        rank, size = self._rank, len(part)
        first_dropout = self._work.stage.stage.first_dropout
        dropout: DropoutPass | None = None

        def begin() -> None:
            nonlocal dropout
            if dropout is None:
                dropout = rank.key_dropout(part, first_dropout)
            else:
                keyed_dropout.resume(dropout)
            self._work.begin_pass(number)
            for joint in self._work.joined:
                joint.weight = 1.0 if size else 0.0
            if rank.emulated is not None:
                rank.emulated.begin_part(size)

        def loss_of(outputs: Any) -> torch.Tensor:
            targets = rank.given(rows_of(part))[1]
            outputs = rank.for_loss(outputs)
            loss, weight = rank.loss_of(outputs, targets, size)
            if rank.emulated is not None:
                rank.emulated.forward(LOSS)
                rank.emulated.backward(LOSS)
            if weight:
                self._sums.loss += float(loss.detach()) * weight / total
                self._sums.weight += weight
            if size:
                self._sums.correct += rank.correct(outputs, targets)
            return loss * (weight / total * self._work.gradients.loss_scale)

        return MicroBatch(max(1, size), begin, lambda: rank.given(rows_of(part))[0], loss_of)

    def _mode(self) -> contextlib.AbstractContextManager[Any]:
        return self._rank.forward_mode()

    def evaluate(self, batch: BatchTensors, number: int) -> tuple[Any, torch.Tensor, float] | None:
        """Outputs, loss and its weight of held-out rows on the last stage; None on the others."""
        rank = self._rank
        samples = len(batch[1])
        one = MicroBatch(
            samples, lambda: None, lambda: rank.given(batch)[0], lambda outputs: outputs
        )
        outputs = self._work.stage.evaluate(one, number, self._mode)
        if not self._work.stage.stage.is_last:
            return None
        with self._mode():
            outputs = rank.for_loss(outputs)
            return outputs, *rank.loss_of(outputs, rank.given(batch)[1], samples)
