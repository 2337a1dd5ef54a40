"""A rank's part of a step as a stage of a pipeline.

The stage takes its micro-batches in the order of the schedule (`allocate.actions.schedules`). What
crosses a cut goes by messages between the ranks beside it; a send goes on while the stage computes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch  # noqa: TID253 - only ranks import this

from trainwright.estimator.trace.cuts.forward_graph import TensorFacts
from trainwright.tasks.allocate.actions.schedules import passes_of
from trainwright.tasks.runs.artefacts.layout import StageSchedule
from trainwright.tasks.runs.artefacts.step_kinds import PassKind
from trainwright.tasks.train.exchange.group_exchange import Exchange, Started
from trainwright.tasks.train.pipeline.deferred_weights import DeferredWeights
from trainwright.tasks.train.pipeline.stage_model import (
    MicroBatchPass,
    StageModel,
    packed,
    unpacked,
)

PassMode = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class StagePlace:
    """Where a rank stands in its pipeline."""

    pipeline: int
    stage: int
    stages: int
    before: int | None
    """the rank of the stage before; None: this is the first"""
    after: int | None


@dataclass(frozen=True)
class MicroBatch:
    """Some samples of the pipeline's part of a step."""

    samples: int
    begin: Callable[[], None]
    """called before its forward pass, and before its backward pass"""
    inputs: Callable[[], Any]
    """the model's argument, for the first stage"""
    loss: Callable[[Any], torch.Tensor]
    """from the model's outputs to its share of the step's loss, for the last stage"""


class StageStep:
    """Runs the passes of a stage."""

    def __init__(
        self,
        stage: StageModel,
        place: StagePlace,
        schedule: StageSchedule,
        exchange: Exchange,
        device: torch.device,
    ) -> None:
        self.stage, self.place = stage, place
        self._schedule = schedule
        self._exchange, self._device = exchange, device
        self.deferred: DeferredWeights | None = None
        """of the schedule zero-bubble"""
        self._sent: list[Started[None]] = []

    def train(
        self,
        micro_batches: Sequence[MicroBatch],
        mode: PassMode,
        last_backward: Callable[[PassKind], None],
        passed: Callable[[PassKind, int], None] = lambda *_: None,
    ) -> None:
        """Forward and backward passes of a step; gradients are added to `grad`.

        Forward passes are made in `mode`, such as autocast. `last_backward` is called before the
        pass that makes the step's last gradients, `passed` after each pass over a micro-batch.
        """
        passes: dict[int, MicroBatchPass] = {}
        stages, last = self.place.stages, len(micro_batches) - 1
        for kind, number in passes_of(self._schedule, stages, self.place.stage, len(micro_batches)):
            one = micro_batches[number]
            if kind == "forward":
                passes[number] = self._forward(one, number, mode)
                passed(kind, number)
                continue
            makes_weights = kind in ("backward", "weight-gradient")
            if number == last and makes_weights:
                last_backward(kind)
            if kind == "weight-gradient":
                assert self.deferred is not None
                self.deferred.finish(number)
            else:
                self._backward(passes.pop(number), one, number)
            passed(kind, number)
        self._finish_sends()

    @torch.no_grad()
    def evaluate(self, one: MicroBatch, number: int, mode: PassMode) -> Any:
        """The forward pass of some samples; the last stage gets the model's outputs."""
        outputs = self._run(one, number, mode).outputs
        self._finish_sends()
        return outputs if self.stage.is_last else None

    def _run(self, one: MicroBatch, number: int, mode: PassMode) -> MicroBatchPass:
        stage = self.stage
        one.begin()
        given = (
            one.inputs()
            if stage.is_first
            else self._receive(
                self.place.before, stage.receives, "activations", number, one.samples
            )
        )
        with mode():
            found = MicroBatchPass(stage, given, one.samples)
        if not stage.is_last:
            self._send(self.place.after, found.outputs, stage.sends, "activations", number)
        return found

    def _forward(self, one: MicroBatch, number: int, mode: PassMode) -> MicroBatchPass:
        if self.deferred is not None:
            self.deferred.micro_batch = number
        found = self._run(one, number, mode)
        if self.stage.is_last:
            with mode():
                found.outputs = one.loss(found.outputs)
        return found

    def _backward(self, one_pass: MicroBatchPass, one: MicroBatch, number: int) -> None:
        stage = self.stage
        gradients: Sequence[torch.Tensor | None]
        if stage.is_last:
            gradients = [torch.ones_like(one_pass.outputs)]
        else:
            gradients = self._receive(
                self.place.after, stage.sends, "gradients", number, one.samples
            )
        one.begin()
        found = one_pass.backward(gradients)
        if not stage.is_first:
            self._send(self.place.before, found, stage.receives, "gradients", number)

    # -- messages ----------------------------------------------------------------------------------

    def _send(
        self,
        to: int | None,
        tensors: Sequence[torch.Tensor | None],
        facts: Sequence[TensorFacts],
        what: str,
        number: int,
    ) -> None:
        """Send what crosses a cut. A tensor without a gradient goes as an empty one."""
        assert to is not None
        sent = [
            torch.empty(0) if one is None else packed(one, fact)
            for one, fact in zip(tensors, facts, strict=True)
        ]
        self._sent.append(self._exchange.start_send(sent, to, self._name(what, number)))

    def _receive(
        self,
        source: int | None,
        facts: Sequence[TensorFacts],
        what: str,
        number: int,
        samples: int,
    ) -> list[Any]:
        assert source is not None
        came = self._exchange.receive(source, self._name(what, number))
        found: list[Any] = []
        for one, fact in zip(came, facts, strict=True):
            absent = what == "gradients" and not one.numel() and fact.shape_of(samples) != (0,)
            found.append(None if absent else unpacked(one, fact, samples).to(self._device))
        return found

    def _name(self, what: str, number: int) -> str:
        return f"{what} of pipeline {self.place.pipeline} micro-batch {number}"

    def _finish_sends(self) -> None:
        for one in self._sent:
            self._exchange.finish(one)
        self._sent.clear()

    def abandon(self) -> None:
        """The step is given up: a rank was lost."""
        self._sent.clear()
        if self.deferred is not None:
            self.deferred.begin()
