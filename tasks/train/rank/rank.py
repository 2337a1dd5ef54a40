"""One rank's work within a step and in validation.

`rank_passes` computes its share of the batch; the worker's `loop` runs the steps.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch  # noqa: TID253 - only ranks import this

from trainwright.estimator.trace.source import ModelDefinition
from trainwright.tasks.data import dataset as data
from trainwright.tasks.data.model_reader import ModelReader
from trainwright.tasks.runs.artefacts.layout import Layout
from trainwright.tasks.train.batch.sampling import own_places
from trainwright.tasks.train.channel import usage_of_this_process
from trainwright.tasks.train.exchange.group_exchange import Exchange
from trainwright.tasks.train.out_of_memory import OutOfMemory, is_out_of_memory
from trainwright.tasks.train.passes import keyed_dropout
from trainwright.tasks.train.rank.joint_noise import JointNoise
from trainwright.tasks.train.rank.loss_scale import LossScale
from trainwright.tasks.train.rank.rank_updates import RankUpdates
from trainwright.tasks.train.rank.step_sums import StepSums
from trainwright.tasks.train.record.timings import Figures, RankFigures, own_meter
from trainwright.tasks.train.request import TrainRequest

if TYPE_CHECKING:
    from trainwright.tasks.train.checkpoint.local_checkpoint import LocalCheckpoint


@dataclass(frozen=True)
class StepFigures:
    """The results of a step on the joint batch, and this rank's own time without waiting."""

    loss: float | None
    """None: nothing in the joint batch has a weight in it, and `update` changes nothing"""
    weight: float
    """the samples of the joint batch, or what else the loss is the mean over"""
    correct: float
    samples: int
    stop: bool
    leave: bool
    own_s: float
    figures: RankFigures
    """of this rank"""


class Rank(RankUpdates):
    """A rank that takes part in every step with its share of the batch."""

    def __init__(
        self,
        request: TrainRequest,
        dataset: data.Dataset | ModelReader,
        collective: Exchange,
        device: torch.device,
        number: int,
        definition: ModelDefinition | None = None,
    ) -> None:
        super().__init__(request, dataset, collective, device, number, definition)
        self._noise = JointNoise()
        self.stop_asked = False
        self.leave_asked: Callable[[], bool] = lambda: False
        self.rest_s = 0.0
        """the rank's compute time outside `StepFigures.own_s`, measured in the previous step"""
        self._late_s = 0.0
        """the part of the previous step's `own_s` after its figures were summed"""
        devices = request.plan.devices
        self._figures = Figures(collective, device, own_meter(devices[number], devices, device))

    def change_layout(self, layout: Layout, members: Sequence[int]) -> None:
        """All ranks of a group, in the same state, train by another layout from now on."""
        self.join_squares()
        super().change_layout(layout, members)

    def used(self) -> dict[str, float]:
        """Peak memory on its device, and the CPU time of its process."""
        on_gpu = self.device.type == "cuda"
        peak = (
            {"peak_memory_bytes": float(torch.cuda.max_memory_reserved(self.device))}
            if on_gpu
            else {}
        )
        return usage_of_this_process() | peak

    def stop_on(self, number: signal.Signals) -> None:
        """Install a handler: on this signal, the training stops at the end of the step."""

        def ask(*_: object) -> None:
            self.stop_asked = True

        signal.signal(number, ask)

    def begin_anew(self, members: Sequence[int] | None = None) -> None:
        """Reset parameters, buffers, optimizer, noise scale and loss scale."""
        self._reset()
        super().begin_anew(members)

    def resume(self, checkpoint: LocalCheckpoint | None, members: Sequence[int]) -> None:
        """Take the state of a checkpoint that the first rank has."""
        self._reset()
        super().resume(checkpoint, members)

    def _reset(self) -> None:
        if self.may_end_step:
            self.drop_step()
        self._noise = JointNoise()
        self.loss_scale = LossScale()

    def step(self, order: Any, begin: int, step: int) -> StepFigures:
        """Run forward and backward passes and sum over ranks; `update` completes the step.

        `order` holds the epoch's rows; the first `begin` of them are done. If the plan accumulates
        gradients, the share is split into micro-batches. They add up to the gradient of the joint
        batch unless a sample's loss depends on other samples: batch normalisation uses the
        statistics of a micro-batch over all ranks. Raises BadInput if the loss is not finite
        because of a sample.
        """
        started, waited = time.perf_counter(), self.collective.wait_s
        self.computing_since = time.monotonic() if self._updated else None
        self._figures.begin()
        total = self._begin_step(order, begin, step)
        size = self._batch_size
        with self._within_memory():
            parts = self._load(order, begin, total)
            self.actions.done(None)
            if self._stage is not None:
                own_sums = self._stage_passes(self._stage, parts, order, total)
                passes = 1.0
            elif self.alone:
                own_sums = self._local_steps(parts, total)
                passes = 1.0
            else:
                own_sums = self._forward_backward_all(parts, order, total)
                keyed_dropout.end_pass()
                passes = 1 + self._measure_alone(parts, step)
            keyed_dropout.end_pass()
        self.actions.done(None, "exchange")
        if self.emulated is not None:
            if self._stage is None:
                self.emulated.end_passes(passes * size)
            else:
                self.emulated.end_stage()
            self.actions.done("backward")
        if self._stage is not None:
            # Then all holders of a lost rank's stage have this step's gradients if any rank ends
            # it, and end it too.
            self._gradients.wait()
            self.actions.done(None, "sum")
            self._layout.wait()
            self.actions.done(None, "gather")
            self._has_gradients = True
        own = time.perf_counter() - started - (self.collective.wait_s - waited)
        # The joint |g|² of the last step comes from the first rank: its last digit may differ
        # between device types, but all ranks must decide by the same value.
        part = StepSums(
            own_sums.loss,
            own_sums.correct,
            self.stop_asked,
            self.leave_asked(),
            self._noise.own_part(first=self.first),
            self._gradients.overflowed or self._layout.overflowed,
            self._squares(),
            self._weights(own_sums.weight),
            self._gradients.used,
        )
        head = torch.tensor(part.numbers(), dtype=torch.float64)
        figures = torch.cat([head, self._figures.arrive(own + self.rest_s + self._late_s)])
        summed = self.collective.sum_(figures, "figures").tolist()
        # If ranks share a core, let the others leave the sum before this one continues.
        os.sched_yield()
        self.actions.done(None, "agree")
        sums = StepSums.of(summed[: len(head)], self.collective.size)
        factor, self._layout.share = sums.factor(total), self._share_of(sums)
        if not math.isfinite(sums.loss):
            self._require_finite_rows(order)
        began_s = self._own_clock_s()
        with self._within_memory():  # of the factors of all ranks
            self._layout.finish(factor)
        if self.emulated is not None:
            self.emulated.settle()
        self.actions.done("late gradient", "gather")
        self._late_s = self._own_clock_s() - began_s
        own += self._late_s
        # Sums go on while the products above are made.
        self._gradients.finish(sums.used, factor)
        self.actions.done(None, "sum")
        self._figures.finish(summed[len(head) :])
        self._note(sums, total)
        stop, leave = sums.stops > 0, sums.leaves > 0
        self.computing_since = None
        loss = sums.loss * factor if sums.weight else None
        return StepFigures(
            loss, sums.weight, sums.correct, total, stop, leave, own, self._figures.own
        )

    @contextlib.contextmanager
    def _within_memory(self) -> Iterator[None]:
        """Raise OutOfMemory if memory for the rank's share of the batch runs out inside."""
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            size, self._has_gradients = self._batch_size, False
            if self._stage is not None:
                raise OutOfMemory(self._stage.does_not_fit(), final=True) from None
            raise OutOfMemory(
                f"a batch of {size} does not fit into memory", batch_size=size
            ) from None

    @property
    def figures_of_all(self) -> list[RankFigures]:
        """The figures of each member's last step, by rank."""
        return self._figures.all

    def step_alone(self, order: Any, begin: int, step: int, updates: int) -> None:
        """Do this rank's first updates of a step, of ranks that train alone: it does not end.

        A replay repeats so what ranks had done when their group broke.
        """
        before = self.collective.step
        total = self._begin_step(order, begin, step)
        self.collective.step = before  # ranks without updates do not begin it
        with self._within_memory():
            parts = [part for part in self._load(order, begin, total) if len(part)]
            self._local_steps(parts[:updates], total)
        self.abandon_step()

    def _begin_step(self, order: Any, begin: int, step: int) -> int:
        """Prepare all for a step's passes. Returns the step's samples on all ranks."""
        places, total = own_places(len(order), begin, self.split, self._sharer)
        self.actions.begin()
        if self.emulated is not None:
            self.emulated.begin(self.rest_s)
        self._seed(step)
        self.collective.step = step
        every = self.layout.resend_every
        if every and step and step % every == 0:
            self.resend()
        self._summed, self._has_gradients = None, False
        self._places, self._batch_size = places, places[1] - places[0]
        self._step, self._first_place = step, places[0] - begin
        self._keep_buffers()
        self._gradients.begin()
        self._layout.begin()
        self._layout.require_cut()
        loss_scale = self.loss_scale.value if self._scales else 1.0
        self._gradients.loss_scale = self._layout.loss_scale = loss_scale
        return total

    def _seed(self, step: int) -> None:
        """Seed torch for this step and rank, so that dropout is the same in a replay.

        Not by `torch.manual_seed`, which is slow: it records a stack trace each time.
        """
        on_gpu = self.device.type == "cuda"
        generator = (
            torch.cuda.default_generators[self.device.index] if on_gpu else torch.default_generator
        )
        generator.manual_seed((self.spec.seed * 1_000_003 + step) * 4096 + self.number)
