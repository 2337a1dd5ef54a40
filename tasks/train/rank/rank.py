"""One rank's work within a step and in validation.

`replica` holds its model and data; the worker's `loop` runs the steps. `gradients` and `batch_norm`
make the result equal to that of one process on the joint batch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np  # noqa: TID253 - only ranks import this
import torch  # noqa: TID253

from trainwright.estimator.devices import half_precision
from trainwright.estimator.memory.freed_memory import keep_freed_memory
from trainwright.estimator.precision import autocast, for_loss
from trainwright.estimator.predict.communication import GRADIENT_BUCKET_BYTES
from trainwright.estimator.trace.layer_tracker import LOSS
from trainwright.estimator.trace.source import ModelDefinition
from trainwright.tasks.data import dataset as data
from trainwright.tasks.data.model_reader import ModelReader
from trainwright.tasks.errors import BadInput, TrainingFailed, TrainwrightError
from trainwright.tasks.train.batch.half_batches import due, half_squares
from trainwright.tasks.train.batch.noise_scale import NoiseScale, noise_and_signal
from trainwright.tasks.train.batch.sampling import own_places, shares
from trainwright.tasks.train.channel import usage_of_this_process
from trainwright.tasks.train.exchange.collective import PeersLost
from trainwright.tasks.train.exchange.device_sums import has_nccl
from trainwright.tasks.train.exchange.group_exchange import Exchange
from trainwright.tasks.train.rank import keyed_dropout
from trainwright.tasks.train.rank.batch_loader import BatchTensors
from trainwright.tasks.train.rank.emulated_device import EmulatedDevice
from trainwright.tasks.train.rank.gradients import GradientSum, clip
from trainwright.tasks.train.rank.loss_scale import LossScale
from trainwright.tasks.train.rank.replica import Replica
from trainwright.tasks.train.rank.validation_metrics import ValidationMetrics, sums_of
from trainwright.tasks.train.record.step_actions import StepActions
from trainwright.tasks.train.record.timings import Figures, RankFigures, own_meter
from trainwright.tasks.train.request import TrainRequest
from trainwright.tasks.train.worker_group import sums_on_devices

LEAST_VALIDATION_BATCH = 64
_NO_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "out of memory",
)


@dataclass(frozen=True)
class StepFigures:
    """The results of a step on the joint batch, and this rank's own time without waiting."""

    loss: float
    correct: float
    samples: int
    stop: bool
    leave: bool
    own_s: float
    figures: RankFigures
    """of this rank"""


class OutOfMemory(TrainingFailed):
    """This rank's share of the batch does not fit into its device's memory."""

    kind = "out_of_memory"


class Rank(Replica):
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
        self.split = [planned.batch_size for planned in request.plan.devices]
        self.noise_scale = NoiseScale()
        self._joint_square, self._rows_square = 0.0, 0.0
        self.stop_asked = False
        self.leave_asked: Callable[[], bool] = lambda: False
        self._emulated = self._emulation(request.plan.devices[number].speed)
        self.rest_s = 0.0
        """the rank's compute time outside `StepFigures.own_s`, measured in the previous step"""
        self._late_s = 0.0
        """the part of the previous step's `own_s` after its figures were summed"""
        self._proven = False
        """whether the model has completed a pass: an error before that is raised as BadInput"""
        self._skip = False
        """whether `update` skips this step, because a gradient overflowed"""
        self._updated = False
        """whether a first step is complete"""
        self._batch_size = 0
        self._step, self._first_place = 0, 0
        """the current step, and the place of this rank's first sample in the joint batch"""
        self.learning_rate = request.learning_rate
        """of the next step, for ranks that train alone"""
        self._loaded: BatchTensors
        """the current step's rows"""
        halves = [half_precision(device.type) for device in request.plan.devices]
        self._half = torch.float16 if halves[number] == "fp16" else torch.bfloat16
        self._scales = self.spec.precision == "amp" and "fp16" in halves  # on all ranks alike
        self.loss_scale = LossScale()
        layout = request.plan.layout
        self._resend_every = layout.resend_every if layout is not None else None
        self._gradients = GradientSum(
            self._layout.summed,
            self.collective,
            layout.chunk_bytes if layout is not None else GRADIENT_BUCKET_BYTES,
            device if has_nccl() and sums_on_devices(request.plan.devices) else None,
        )
        self._with_buffers = [module for module in self.model.modules() if module._buffers]
        self._before_step: list[tuple[torch.nn.Module, str, torch.Tensor]] | None = None
        """copies of the buffers, for `abandon_step`"""
        self.fits = 0
        """the largest batch of this rank in a finished step"""
        self.computing_since: float | None = None
        """when the current step began (time.monotonic); None between steps and in the first one

        The first step takes longer, since libraries initialise themselves.
        """
        devices = request.plan.devices
        self._figures = Figures(collective, device, own_meter(devices[number], devices, device))
        self.actions = StepActions(collective, device)
        """what its steps take, by kind of action"""

    def _own_clock_s(self) -> float:
        """A clock that stands still while the rank waits for others."""
        return time.perf_counter() - self.collective.wait_s

    def _emulation(self, speed: float | None) -> EmulatedDevice | None:
        """What makes the rank as slow as an emulated device of this speed."""
        if speed is None:
            return None
        plan = self.request.plan
        syncs = plan.layout.sync if plan.layout is not None else {}
        emulated = EmulatedDevice(speed, plan.emulated_layers, syncs, self._own_clock_s)
        emulated.watch(self.model)
        self._layout.computed = emulated.joint
        return emulated

    @property
    def emulated_s(self) -> float | None:
        """What the last step took an emulated device; None if the device is real."""
        return self._emulated.due_s if self._emulated is not None else None

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

    def begin_anew(self) -> None:
        """Reset parameters, buffers, optimizer, noise scale and loss scale."""
        super().begin_anew()
        self.noise_scale, self._joint_square, self._rows_square = NoiseScale(), 0.0, 0.0
        self.loss_scale = LossScale()

    def _buffers(self) -> Iterator[tuple[torch.nn.Module, str, torch.Tensor]]:
        """All buffers. Faster per step than `model.named_buffers()`, which walks all modules."""
        for module in self._with_buffers:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield module, name, buffer

    def abandon_step(self) -> None:
        """Undo the changes of an unfinished step: the forward pass updates running statistics."""
        if self._before_step is not None:
            for module, name, value in self._before_step:
                module._buffers[name].copy_(value)  # type: ignore[union-attr]
        self._before_step = self.computing_since = None
        keyed_dropout.end_pass()
        if self._emulated is not None:
            self._emulated.stop()
        self._gradients.begin()
        self._layout.begin()
        self.model.train()

    def step(self, order: Any, begin: int, step: int) -> StepFigures:
        """Run forward and backward passes and sum over ranks; `update` completes the step.

        `order` holds the epoch's rows; the first `begin` of them are done. If the plan accumulates
        gradients, the share is split into micro-batches. They add up to the gradient of the joint
        batch unless a sample's loss depends on other samples: batch normalisation uses the
        statistics of a micro-batch over all ranks.
        """
        places, total = own_places(len(order), begin, self.split, self.number)
        started, waited = time.perf_counter(), self.collective.wait_s
        self.computing_since = time.monotonic() if self._updated else None
        self._figures.begin()
        self.actions.begin()
        if self._emulated is not None:
            self._emulated.begin(self.rest_s)
        self._seed(step)
        self.collective.step = step
        if self._resend_every and step and step % self._resend_every == 0:
            self.resend()
        self._batch_size = size = places[1] - places[0]
        self._step, self._first_place = step, places[0] - begin
        self._before_step = [
            (module, name, buffer.clone()) for module, name, buffer in self._buffers()
        ]
        self._gradients.begin()
        self._layout.begin()
        self._layout.require_cut()
        loss_scale = self.loss_scale.value if self._scales else 1.0
        self._gradients.loss_scale = self._layout.loss_scale = loss_scale
        self._layout.share = size / total
        with self._within_memory():
            following = self._following(len(order), begin + total)
            self._loaded = self.loader.batch(order, places, following)
            parts = self._micro_batches(size, total)
            self.actions.done(None)
            if self.alone:
                loss, correct = self._local_steps(parts, total)
                passes = 1.0
            else:
                loss, correct = self._forward_backward_all(parts, order, total)
                keyed_dropout.end_pass()
                passes = 1 + self._measure_alone(parts, step)
            keyed_dropout.end_pass()
        self.actions.done(None, "exchange")
        if self._emulated is not None:
            self._emulated.end_passes(passes * size)
            self.actions.done("backward")
        own = time.perf_counter() - started - (self.collective.wait_s - waited)
        # This rank sent h = (b / B) · g, so b · |g|² = B² / b · |h|². The joint |g|² of the last
        # step comes from the first rank: its last digit may differ between device types, but all
        # ranks must decide by the same value.
        square = self._gradients.own_square + self._layout.own_square
        spread = total**2 / size * square if size else 0.0
        spread += self._spread_of_rows(total)
        joint_square = self._joint_square if self.first else 0.0
        joint_square += self._rows_square
        asked = [self.stop_asked, self.leave_asked()]
        scalars = [
            loss,
            correct,
            *asked,
            spread,
            size > 0,
            joint_square,
            self._gradients.overflowed or self._layout.overflowed,
        ]
        head = torch.tensor([*scalars, *self._gradients.used], dtype=torch.float64)
        figures = torch.cat([head, self._figures.arrive(own + self.rest_s + self._late_s)])
        summed = self.collective.sum_(figures, "figures").tolist()
        # If ranks share a core, let the others leave the sum before this one continues.
        os.sched_yield()
        self.actions.done(None, "agree")
        self._gradients.finish(summed[len(scalars) : len(head)])
        self.actions.done(None, "sum")
        began_s = self._own_clock_s()
        with self._within_memory():  # of the factors of all ranks
            self._layout.finish()
        if self._emulated is not None:
            self._emulated.settle()
        self.actions.done("late gradient", "gather")
        self._late_s = self._own_clock_s() - began_s
        own += self._late_s
        self._figures.finish(summed[len(head) :])
        loss, correct, stops, leaves, spread, ranks, joint_square, overflows = summed[
            : len(scalars)
        ]
        self._skip = self._scales and overflows > 0
        self.noise_scale.complete(joint_square)
        self.noise_scale.begin(spread, total, round(ranks))
        joint_square = self._gradients.joint_square() + self._layout.joint_square
        self._joint_square = joint_square if ranks > 1 else 0.0
        self._rows_square = self._layout.rows_square if ranks > 1 else 0.0
        if self._skip:
            self.noise_scale.ranks, self._joint_square, self._rows_square = 0, 0.0, 0.0
        self.computing_since = None
        return StepFigures(loss, correct, total, stops > 0, leaves > 0, own, self._figures.own)

    @contextlib.contextmanager
    def _within_memory(self) -> Iterator[None]:
        """Raise OutOfMemory if memory for the rank's share of the batch runs out inside."""
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            size = self._batch_size
            raise OutOfMemory(
                f"a batch of {size} does not fit into memory", batch_size=size
            ) from None

    @property
    def figures_of_all(self) -> list[RankFigures]:
        """The figures of each member's last step, by rank."""
        return self._figures.all

    def _measure_alone(self, parts: list[Any], step: int) -> float:
        """On a single-device plan, measure the noise scale from halves of the batch.

        Returns the cost in passes over the batch, 0 at steps without a measurement. If the batch
        is split into micro-batches, the first two of them serve as halves. The last remaining
        rank of a larger plan does not measure: a replay with all ranks could not repeat it.
        """
        rows, first = np.concatenate(parts[:2]), len(parts[0]) if len(parts) > 1 else None
        wanted = len(self.request.plan.devices) == 1 and self.spec.adaptive_batch and len(rows) >= 4
        if not wanted or not due(step, self.noise_scale.estimates):
            return 0

        def loss_of(part: Any) -> torch.Tensor:
            return self._forward(*self._given(self._part(part)))[1]

        self.noise_scale.add(*noise_and_signal(*half_squares(self.model, loss_of, rows, first)))
        return len(rows) / sum(map(len, parts))

    def _spread_of_rows(self, total: int) -> float:
        """Σ_r B² / b_r · |h_r|² of the rows of sharded layers that this rank holds."""
        if not self._layout.is_cut:
            return 0.0
        parts = shares(total, self.split)
        sizes = [parts[number] for number in self._layout.members]
        squares = zip(sizes, self._layout.squares, strict=True)
        return sum(total**2 / size * square for size, square in squares if size)

    def join_squares(self, *, holds: bool = True) -> None:
        """Add |g|² of the rows on all ranks to that of the last step, for `noise_document`.

        All ranks of a group call it at once. A rank that does not hold current rows adds none.
        """
        if not self._layout.sharded:
            return
        own = torch.tensor([self._rows_square if holds else 0.0], dtype=torch.float64)
        self._joint_square += float(self.collective.sum_(own, "squares of rows"))
        self._rows_square = 0.0

    def noise_document(self) -> dict[str, Any]:
        """JSON for a checkpoint: the state of noise scale, and loss scale and averages if used."""
        scale = {"loss_scale": self.loss_scale.document()} if self._scales else {}
        averages = {"averaging": self.averaging.document()} if self.averaging is not None else {}
        own = self.noise_scale.document() | {"joint_square": self._joint_square}
        return own | scale | averages

    def load_noise(self, document: dict[str, Any]) -> None:
        """Restore a `noise_document`."""
        self._joint_square, self._rows_square = document["joint_square"], 0.0
        self.noise_scale = NoiseScale(
            **{name: document[name] for name in self.noise_scale.document()}
        )
        self.loss_scale = LossScale(**document.get("loss_scale", {}))
        if self.averaging is not None and "averaging" in document:
            self.averaging.load(document["averaging"])

    def _following(self, rows: int, begin: int) -> list[tuple[int, int]]:
        """The places of this rank's rows in the next steps of the epoch, if the split stays.

        As many as the loader reads ahead.
        """
        steps: list[tuple[int, int]] = []
        while begin < rows and len(steps) < self.loader.ahead:
            own, total = own_places(rows, begin, self.split, self.number)
            steps.append(own)
            begin += total
        return steps

    def _part(self, places: Any) -> BatchTensors:
        """A micro-batch of the step's rows, by the first and last of its places among them."""
        inputs, targets = self._loaded
        if len(places) == len(targets):
            return self._loaded
        part = slice(int(places[0]), int(places[-1]) + 1)
        return {name: tensor[part] for name, tensor in inputs.items()}, targets[part]

    def _micro_batches(self, size: int, total: int) -> list[Any]:
        """Split the rank's rows evenly into as many micro-batches as the plan and the rows allow.

        Each is an array of places among the step's rows.

        With joint batch normalisation or sharded layers, all ranks have the same number of parts,
        some perhaps empty.
        Without it, empty parts are dropped, but one part always remains.
        """
        rows = np.arange(size)
        layout = self.request.plan.layout
        if self.alone and layout is not None and layout.local_batch is not None:
            return np.array_split(rows, max(1, round(size / layout.local_batch)))
        if self.request.plan.accumulation == 1:
            return [rows]
        parts = np.array_split(
            rows, min(self.request.plan.accumulation, max(shares(total, self.split)))
        )
        if self._joined or self._layout.is_cut:
            return parts
        return [part for part in parts if len(part)] or parts[:1]

    def _forward_backward_all(
        self, parts: list[Any], order: Any, total: int
    ) -> tuple[float, float]:
        loss, correct = 0.0, 0.0
        for number, part in enumerate(parts):
            self._gradients.last = number == len(parts) - 1
            self._layout.begin_part(number, last=self._gradients.last)
            if self._emulated is not None:
                self._emulated.begin_part(len(part))
            for joint in self._joined:
                joint.weight = 1.0 if len(part) else 0.0
            # An empty part must still join the sums: it runs one sample with weight 0.
            self._key_dropout(part)
            rows = self._part(part) if len(part) else self.loader.rows(order[:1])
            found = self._forward_backward(rows, len(part) / total)
            loss, correct = loss + found[0], correct + (found[1] if len(part) else 0.0)
        return loss, correct

    def _local_steps(self, parts: list[Any], total: int) -> tuple[float, float]:
        """Train this rank alone: an update after each micro-batch. Of a layout that averages."""
        loss, correct = 0.0, 0.0
        for part in parts:
            if not len(part):
                continue
            self.optimizer.zero_grad(set_to_none=True)
            self._key_dropout(part)
            if self._emulated is not None:
                self._emulated.begin_part(len(part))
            found = self._forward_backward(self._part(part), 1.0)
            if self._unscaled():
                self._optimizer_step(self.learning_rate)
            self.actions.done("update")
            loss += found[0] * len(part) / total
            correct += found[1]
        return loss, correct

    def _key_dropout(self, part: Any) -> None:
        """Masks of dropout follow the samples' places in the joint batch."""
        first = self._first_place + (int(part[0]) if len(part) else 0)
        keyed_dropout.begin_pass(self.spec.seed, self._step, first, max(1, len(part)))

    def _unscaled(self) -> bool:
        """Divide the gradients by the loss scale; False if one of them is not finite."""
        if not self._scales:
            return True
        gradients = [one.grad for one in self.model.parameters() if one.grad is not None]
        torch._foreach_div_(gradients, self._gradients.loss_scale)
        finite = all(bool(one.isfinite().all()) for one in gradients)
        self._gradients.overflowed |= not finite
        return finite

    def _seed(self, step: int) -> None:
        """Seed torch for this step and rank, so that dropout is the same in a replay.

        Not by `torch.manual_seed`, which is slow: it records a stack trace each time.
        """
        on_gpu = self.device.type == "cuda"
        generator = (
            torch.cuda.default_generators[self.device.index] if on_gpu else torch.default_generator
        )
        generator.manual_seed((self.spec.seed * 1_000_003 + step) * 4096 + self.number)

    def _forward(self, inputs: Any, targets: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """The model's outputs and their mean loss; in evaluation mode without label smoothing."""
        loss_of = self._loss if self.model.training else self._validation_loss
        if self.spec.precision in ("fp32", "fp64"):
            outputs = self.model(inputs)
            return outputs, loss_of(outputs, targets)
        with autocast(self.spec.precision, self.device.type, half=self._half):
            outputs = for_loss(self.model(inputs))
            return outputs, loss_of(outputs, targets)

    def _forward_backward(self, rows: BatchTensors, weight: float) -> tuple[float, float]:
        """This part's share of the joint loss, and its number of correct classifications."""
        inputs, targets = self._given(rows)
        try:
            outputs, loss = self._forward(inputs, targets)
            self.actions.done("forward", "exchange")
            if self._emulated is not None:
                self._emulated.forward(LOSS)
                self._emulated.backward(LOSS)
            (loss * (weight * self._gradients.loss_scale)).backward()
            if self._gradients.last:
                self._gradients.send_rest()
                self._layout.send_rest()
            self.actions.done("backward", "exchange")
            correct = self._correct(outputs, targets)
        except TrainwrightError:
            raise
        except Exception as error:
            if self._proven or is_out_of_memory(error) or isinstance(error.__cause__, PeersLost):
                raise
            raise BadInput(
                f"model: a batch of inputs {_shapes(inputs)} and targets {_shapes(targets)} raised "
                f"{type(error).__name__}: {error}"
            ) from error
        self._proven = True
        return float(loss.detach()) * weight if weight else 0.0, correct

    def update(self, learning_rate: float) -> None:
        """Run the optimizer with the summed gradients, unless a scaled gradient overflowed.

        Ranks that train alone have done that. The step is then complete: `average_if_due` follows.
        """
        self.actions.done(None)
        if not self.alone and not self._skip:
            self._optimizer_step(learning_rate)
        self.actions.done("update")
        if self.averaging is not None:
            self.averaging.step_done(self._batch_size)
        if self._scales:
            self.loss_scale.after_step(overflowed=self._skip)
        self._before_step = None
        self.fits = max(self.fits, self._batch_size)

    def average_if_due(self) -> None:
        """Average the layers that are averaged, if it is time. All ranks call it after `update`.

        If a rank is lost meanwhile, the average is done when the next group forms.
        """
        if self.averaging is None or not self.averaging.due:
            return
        self.actions.done(None)
        self.averaging.average()
        self.actions.done("update", "average")

    def average(self, *, moments: bool = False) -> None:
        """Give all ranks the same parameters, if some are averaged. All ranks call it at once."""
        if self.averaging is not None:
            self.averaging.average(moments=moments)

    def _optimizer_step(self, learning_rate: float) -> None:
        if self.spec.clip_norm is not None:
            clip(self.model.parameters(), self.spec.clip_norm, *self._layout.parts())
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        if not self._updated:  # all long-lived tensors are allocated now
            keep_freed_memory()
        self._updated = True

    @torch.no_grad()
    def validate(self) -> ValidationMetrics:
        """Loss and the task's metrics on the held-out rows, split over the ranks."""
        parts = shares(len(self.validation_rows), self.split)
        begin = sum(parts[: self.number])
        rows = self.validation_rows[begin : begin + parts[self.number]]
        figures, schema = torch.zeros(3, dtype=torch.float64), self.request.schema_
        first = self.loader.rows(self.validation_rows[:1])[1].reshape(-1)[0]
        classes, naive = len(schema.classes or ()), self._naive_error()
        sums = sums_of(schema.task, classes, float(first), self.device, naive)
        size = max(LEAST_VALIDATION_BATCH, self.split[self.number])
        self.model.eval()
        batches = 0
        for batch in self.loader.in_turn(rows, size):
            self._layout.begin_part(batches, last=False)
            batches += 1
            inputs, targets = self._given(batch)
            outputs, loss = self._forward(inputs, targets)
            count = len(targets)
            figures += torch.tensor(
                [float(loss) * count, self._correct(outputs, targets), count], dtype=torch.float64
            )
            if sums is not None:
                sums.add(outputs, targets)
        self._join_others(batches, parts)
        self.model.train()
        loss, correct, count = self.collective.sum_(figures, "validation").tolist()
        metrics = {"loss": loss / count}
        if self.classifies:
            metrics["accuracy"] = correct / count
        if sums is None:
            return ValidationMetrics(metrics)
        sums.vector = self.collective.sum_(sums.vector.cpu(), "metrics")
        found = sums.found(count)
        return ValidationMetrics({**metrics, **found.metrics, **metrics}, found.by_class)

    def _join_others(self, batches: int, parts: Sequence[int]) -> None:
        """Take part in the other ranks' batches of a validation, if layers are sharded.

        With one row, whose outputs don't count. `parts` are the rows of each device.
        """
        if not self._layout.is_cut:
            return
        sizes = [max(LEAST_VALIDATION_BATCH, one) for one in self.split]
        most = max(-(-part // size) for part, size in zip(parts, sizes, strict=True))
        for number in range(batches, most):
            self._layout.begin_part(number, last=False)
            self._forward(*self._given(self.loader.rows(self.validation_rows[:1])))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python, torch's allocators or the GPU driver ran out of memory."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)
    )


def _shapes(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shapes(one)}" for name, one in value.items())
    return f"{tuple(value.shape)} {value.dtype}".replace("torch.", "")
