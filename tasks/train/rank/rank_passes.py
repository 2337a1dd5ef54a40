"""A rank's passes over its share of a batch: its micro-batches, their loss and their gradients.

`rank` makes steps of them. `gradients` and `batch_norm` make the result equal to that of one
process on the joint batch.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch  # noqa: TID253

from trainwright.estimator.devices import half_precision
from trainwright.estimator.memory.freed_memory import keep_freed_memory
from trainwright.estimator.precision import autocast, for_loss
from trainwright.estimator.trace.layer_tracker import LOSS
from trainwright.estimator.trace.source import ModelDefinition
from trainwright.tasks.data import dataset as data
from trainwright.tasks.data.model_reader import ModelReader
from trainwright.tasks.runs.artefacts.layout import Layout
from trainwright.tasks.train.exchange.device_sums import has_nccl
from trainwright.tasks.train.exchange.group_exchange import Exchange
from trainwright.tasks.train.layouts.gradients import GradientSum, clip
from trainwright.tasks.train.passes import keyed_dropout
from trainwright.tasks.train.passes.keyed_dropout import DropoutPass
from trainwright.tasks.train.passes.pass_sums import PassSums
from trainwright.tasks.train.pipeline.stage_gradients import StageGradients
from trainwright.tasks.train.pipeline.stage_passes import StagePasses
from trainwright.tasks.train.pipeline.stage_work import StageWork
from trainwright.tasks.train.rank.batch_loader import BatchTensors
from trainwright.tasks.train.rank.emulated_device import EmulatedDevice
from trainwright.tasks.train.rank.first_pass import FirstPass, shapes
from trainwright.tasks.train.rank.loss_scale import LossScale
from trainwright.tasks.train.rank.rank_rows import RankRows
from trainwright.tasks.train.record.step_actions import StepActions
from trainwright.tasks.train.request import TrainRequest
from trainwright.tasks.train.worker_group import sums_on_devices


class RankPasses(RankRows):
    """Forward and backward passes in any layout."""

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
        self.split = request.plan.shares
        self.emulated = self._emulation(request.plan.devices[number].speed)
        self._first_pass = FirstPass()
        self._updated = False
        """whether a first step is complete"""
        self._step, self._first_place = 0, 0
        """the current step, and the place of this rank's first sample in the joint batch"""
        self.learning_rate = request.learning_rate
        """of the next step, for ranks that train alone"""
        halves = [half_precision(device.type) for device in request.plan.devices]
        self._half = torch.float16 if halves[number] == "fp16" else torch.bfloat16
        self._scales = self.spec.precision == "amp" and "fp16" in halves  # on all ranks alike
        self.loss_scale = LossScale()
        self._gradients: GradientSum | StageGradients = self._summed_gradients()
        self._leader = number
        self._with_buffers = [module for module in self.model.modules() if module._buffers]
        self._before_step: list[tuple[torch.nn.Module, str, torch.Tensor]] | None = None
        """copies of the buffers, for `abandon_step`"""
        self.actions = StepActions(collective, device)
        """what its steps take, by kind of action"""

    def _summed_gradients(self) -> GradientSum:
        devices = self.request.plan.devices
        return GradientSum(
            self._layout.summed,
            self.collective,
            self.layout.chunk_bytes,
            self.device if has_nccl() and sums_on_devices(devices) else None,
        )

    def adopt(self, layout: Layout) -> None:
        """Train by another layout from now on; see `Replica.adopt`."""
        if layout == self.layout:
            return
        super().adopt(layout)
        self._gradients.release()
        self._gradients, self._stage = self._summed_gradients(), None
        if self.emulated is not None:
            self.emulated.follow(layout.sync, self._recomputed())
            self.emulated.later = ()
            self._layout.computed = self.emulated.joint

    def cut(self, members: Sequence[int]) -> None:
        """The ranks of a group have the same state; see `Replica.cut`."""
        super().cut(members)
        if not isinstance(self._layout, StageWork):
            return
        if self._stage is not None:
            self._gradients.release()
        self._gradients, self._stage = self._layout.gradients, StagePasses(self, self._layout)
        self._leader = self._layout.sharers[self.collective.rank]
        deferred = self._layout.stage.deferred
        if self.emulated is not None and deferred is not None:
            self.emulated.later = {*deferred.names}

    def _own_clock_s(self) -> float:
        """A clock that stands still while the rank waits for others."""
        return time.perf_counter() - self.collective.wait_s

    def _emulation(self, speed: float | None) -> EmulatedDevice | None:
        """What makes the rank as slow as an emulated device of this speed."""
        if speed is None:
            return None
        plan = self.request.plan
        emulated = EmulatedDevice(
            speed,
            plan.emulated_layers,
            self.layout.sync,
            self._own_clock_s,
            recomputed=self._recomputed(),
        )
        emulated.watch(self.model)
        self._layout.computed = emulated.joint
        return emulated

    @property
    def emulated_s(self) -> float | None:
        """What the last step took an emulated device; None if the device is real."""
        return self.emulated.due_s if self.emulated is not None else None

    def _forward_backward_all(self, parts: list[Any], order: Any, total: int) -> PassSums:
        sums = PassSums()
        if not parts:
            self._send_rest()
        for number, part in enumerate(parts):
            self._gradients.last = number == len(parts) - 1
            self._layout.begin_part(number, last=self._gradients.last)
            if self.emulated is not None:
                self.emulated.begin_part(len(part))
            for joint in self._joined:
                joint.weight = 1.0 if len(part) else 0.0
            # An empty part must still join the sums: it runs one sample with weight 0.
            self.key_dropout(part)
            rows = self._part(part) if len(part) else self.loader.rows(order[:1])
            loss, weight, correct = self._forward_backward(rows, len(part), total)
            sums.loss += loss * (weight / total) if weight else 0.0
            sums.correct += correct if len(part) else 0.0
            sums.weight += weight
        return sums

    def _stage_passes(
        self, stage: StagePasses, parts: list[Any], order: Any, total: int
    ) -> PassSums:
        def rows_of(part: Any) -> BatchTensors:
            return self._part(part) if len(part) else self.loader.rows(order[:1])

        with self._first_pass.named_errors(lambda: "a stage's micro-batch"):
            return stage.train(parts, rows_of, total)

    def _buffers(self) -> Iterator[tuple[torch.nn.Module, str, torch.Tensor]]:
        """All buffers. Faster per step than `model.named_buffers()`, which walks all modules."""
        for module in self._with_buffers:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield module, name, buffer

    def _keep_buffers(self) -> None:
        """Copy the buffers, for `abandon_step`."""
        self._before_step = [
            (module, name, buffer.clone()) for module, name, buffer in self._buffers()
        ]

    def _local_steps(self, parts: list[Any], total: int) -> PassSums:
        """Train this rank alone: an update after each micro-batch. Of a layout that averages."""
        sums = PassSums()
        for part in parts:
            if not len(part):
                continue
            self.optimizer.zero_grad(set_to_none=True)
            self.key_dropout(part)
            if self.emulated is not None:
                self.emulated.begin_part(len(part))
            loss, weight, correct = self._forward_backward(self._part(part), len(part), None)
            if self._unscaled() and weight:
                self._optimizer_step(self.learning_rate)
            if self.averaging is not None:
                self.averaging.trained_alone(weight)
                self._keep_buffers()
            self.actions.done("update")
            sums.loss += loss * weight / total if weight else 0.0
            sums.correct += correct
            sums.weight += weight
        return sums

    def key_dropout(self, part: Any, first_call: int = 0) -> DropoutPass:
        """Masks of dropout follow the samples' places in the joint batch.

        `first_call`: as of `keyed_dropout.begin_pass`.
        """
        first, samples = self._first_place + (int(part[0]) if len(part) else 0), max(1, len(part))
        return keyed_dropout.begin_pass(self.spec.seed, self._step, first, samples, first_call)

    def _unscaled(self) -> bool:
        """Divide the gradients by the loss scale; False if one of them is not finite."""
        if not self._scales:
            return True
        gradients = [one.grad for one in self.model.parameters() if one.grad is not None]
        torch._foreach_div_(gradients, self._gradients.loss_scale)
        finite = all(bool(one.isfinite().all()) for one in gradients)
        self._gradients.overflowed |= not finite
        return finite

    def _forward(
        self, inputs: Any, targets: torch.Tensor, samples: int
    ) -> tuple[Any, torch.Tensor, float]:
        """The model's outputs, their mean loss and its weight; see `loss_of`."""
        with self.forward_mode():
            outputs = self.for_loss(self.model(inputs))
            return outputs, *self.loss_of(outputs, targets, samples)

    def for_loss(self, outputs: Any) -> Any:
        """The model's outputs in the precision in which the loss is computed."""
        return outputs if self.spec.precision in ("fp32", "fp64") else for_loss(outputs)

    def forward_mode(self) -> contextlib.AbstractContextManager[Any]:
        """That of forward passes: autocast, if the precision asks for it."""
        if self.spec.precision in ("fp32", "fp64"):
            return contextlib.nullcontext()
        return autocast(self.spec.precision, self.device.type, half=self._half)

    def loss_of(
        self, outputs: Any, targets: torch.Tensor, samples: int
    ) -> tuple[torch.Tensor, float]:
        """The mean loss and its weight; in evaluation mode without label smoothing.

        Of no samples, one stands for them, without a weight.
        """
        of_mode = self._loss if self.model.training else self._validation_loss
        return of_mode.weighted(outputs, targets, samples)

    def _forward_backward(
        self, rows: BatchTensors, samples: int, total: int | None
    ) -> tuple[float, float, float]:
        """A part's mean loss, its weight, and its number of correct classifications.

        Gradients are of its share in a joint batch of `total` samples; None: of its own mean.
        """
        inputs, targets = self.given(rows)
        with self._first_pass.named_errors(
            lambda: f"a batch of inputs {shapes(inputs)} and targets {shapes(targets)}"
        ):
            outputs, loss, weight = self._forward(inputs, targets, samples)
            self.actions.done("forward", "exchange")
            if self.emulated is not None:
                self.emulated.forward(LOSS)
                self.emulated.backward(LOSS)
            share = float(weight > 0) if total is None else weight / total
            (loss * (share * self._gradients.loss_scale)).backward()
            if self._gradients.last:
                self._send_rest()
            self.actions.done("backward", "exchange")
            correct = self.correct(outputs, targets)
        return float(loss.detach()), weight, correct

    def _send_rest(self) -> None:
        """After the step's last backward pass."""
        self._gradients.send_rest()
        self._layout.send_rest()

    def _optimizer_step(
        self, learning_rate: float, norm_square: float | None = None
    ) -> float | None:
        """Update the parameters. Returns |g|² of all ranks, if gradients are clipped by it.

        `norm_square` is that, if it is known.
        """
        if self.spec.clip_norm is not None:
            layout = self._layout

            def joint(own: float) -> float:
                return layout.joint_norm_square(own) if norm_square is None else norm_square

            norm_square = clip(self.model.parameters(), self.spec.clip_norm, layout.parts, joint)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        if not self._updated:  # all long-lived tensors are allocated now
            keep_freed_memory()
        self._updated = True
        return norm_square
