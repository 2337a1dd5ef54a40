"""The training loop: from the start or a checkpoint to the end. (`lr_ramp` searches the rate.)"""

from __future__ import annotations

import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch  # noqa: TID253 - only ranks import this

from trainwright.tasks.errors import TrainingFailed
from trainwright.tasks.train.batch.batch_split import BatchSplit
from trainwright.tasks.train.batch.sampling import shares, steps_left
from trainwright.tasks.train.channel import Channel
from trainwright.tasks.train.checkpoint import files
from trainwright.tasks.train.checkpoint.checkpoint_transfer import SentJournal
from trainwright.tasks.train.checkpoint.saver import Saver
from trainwright.tasks.train.rank.divergence import (
    LossDiverged,
    judge,
    require_finite,
    without_weight,
)
from trainwright.tasks.train.rank.optimizer import learning_rate_at
from trainwright.tasks.train.rank.rank import Rank, StepFigures
from trainwright.tasks.train.record.journal import StepJournal
from trainwright.tasks.train.record.tensorboard import Events
from trainwright.tasks.train.record.timings import RankFigures
from trainwright.tasks.train.request import Order
from trainwright.tasks.train.worker.early_stopping import (
    better_tie,
    deciding_metric,
    early_stop,
    score_of,
)
from trainwright.tasks.train.worker.state_sync import agree, return_to_checkpoint, take_all
from trainwright.tasks.train.worker_group import WorkerGroup

MOST_SETBACKS = 3


class Training:
    """The loop over epochs. It outlives the worker groups it takes part in."""

    def __init__(self, rank: Rank, channel: Channel, order: Order) -> None:
        self.rank, self.channel, self.order = rank, channel, order
        self.work = Path(rank.request.work_folder)
        self.steps = (
            StepJournal(self.work, rank.number)
            if order.launch is not None
            else SentJournal(channel, rank.number)
        )
        self.batch = BatchSplit(rank, channel)
        self.rows, self.device = len(rank.train_rows), rank.request.plan.devices[rank.number].id
        self.total_samples = self.rows * rank.spec.epochs
        self.state: files.CheckpointState | None = None
        self.rows_taken: tuple[int, int] | None = None
        """the newest group since this rank has taken rows of sharded layers, and of which step

        If groups break while they form, it may have rows that no other has, and no other state.
        The rows don't count if a group formed without this rank: the others may have gone back.
        """
        self.generation = 0
        """of the newest group that this rank has joined"""
        self.last: dict[str, Any] | None = None
        """the last finished step; the same on every rank"""
        self.summed: list[str] = []
        """the group's layers that must be summed"""
        self.committed = 0
        """the step of the newest staged checkpoint when the worker group formed"""
        self.saved, self.best_at = 0, 0
        """the steps of the newest checkpoint, and of the newest best checkpoint"""
        self.redo = False
        """whether to save again, because a rank was lost while a checkpoint was being written"""
        self.saver = Saver(rank, channel, order)
        self._recording_s = 0.0
        """the seconds that recording the previous step took"""
        self.writer: Events | None = None
        self._skipped = False
        """whether a step had no loss, as nothing in its batch has a weight in it"""

    @property
    def finished(self) -> int | None:
        """How many steps this rank has finished; None before it has a state."""
        return self.state.step if self.state is not None else None

    @property
    def total_steps(self) -> int:
        """Steps of the whole training, if the batch size does not change again."""
        state = self._state
        return state.step + steps_left(
            state.samples, self.rows, self.rank.spec.epochs, sum(self.rank.split)
        )

    def take_part(self, group: WorkerGroup) -> dict[str, Any] | None:
        """Train with the members of a worker group.

        Returns this rank's final report, or None if all members leave the group between steps.
        """
        self.enter(group)
        return self._run(stopped=group.end)

    def enter(self, group: WorkerGroup) -> None:
        """Synchronise the state with the members of a worker group, and split the batch."""
        self.committed, self.summed = group.committed, group.summed
        agree(self, group)
        self.rank.adopt(self.batch.layout(self._state, group))
        self.rank.cut(group.members)
        self.batch.enter(self._state, group)
        self._open_writer()

    @property
    def _state(self) -> files.CheckpointState:
        assert self.state is not None
        return self.state

    @property
    def _complete(self) -> bool:
        """Whether no step is left: all epochs are done, or the training ended early."""
        return self._state.ended or self._state.samples == self.total_samples

    @property
    def _members(self) -> list[int]:
        return self._state.members or []

    def _open_writer(self) -> None:
        if not self.rank.first:
            if self.writer is not None:
                self.writer.close()
            self.writer = None
        elif self.writer is None:
            self.writer = Events(self.work / "events", self._state.step)

    def _run(self, stopped: bool) -> dict[str, Any] | None:
        rank = self.rank
        leave, order, ordered_for, epoch_started = False, None, -1, time.perf_counter()
        stepped = False
        while True:
            try:
                self._finish_step(stopped, time.perf_counter() - epoch_started)
                state = self._state
                if stopped or self._complete:
                    break
                if stepped:
                    self.batch.rebalance(state)
                if leave:
                    self.batch.average(state)
                    return None
                state.epoch, begun = divmod(state.samples, self.rows)
                if state.epoch != ordered_for:
                    order, ordered_for = rank.epoch_order(state.epoch), state.epoch
                    epoch_started = time.perf_counter()
                stopped, leave = self.step(order, begun)
                stepped = True
            except LossDiverged as error:
                self._go_back(str(error))
                stopped = leave = stepped = False
        if self.writer is not None:
            self.writer.close()
            self.writer = None
        return {
            "stopped": stopped and not self._complete,
            "early_stopped": self._early_stopped(),
            "step": state.step,
            "metrics": state.metrics,
            "by_class": state.by_class,
            "events": state.events,
            "split": rank.split,
            "duration_s": state.duration_s,
            "noise_scale": rank.noise_scale.value,
            "by_kind": rank.actions.summary(),
            **rank.used(),
        }

    def _finish_step(self, stopped: bool, epoch_s: float) -> None:
        """End the epoch or save a checkpoint if due.

        If a rank is lost meanwhile, the next worker group starts with this call again.
        """
        state, policy = self._state, self.rank.spec.checkpoint
        if state.samples % self.rows == 0 and state.epoch_samples > 0:
            self._end_epoch(epoch_s)
        last = stopped or self._complete
        due = self.redo or state.step % policy.every_steps == 0 or (state.best and policy.keep_best)
        if (last and state.step > self.committed) or (due and state.step > self.saved):
            self._checkpoint(last=last)

    def step(self, order: Any, begun: int) -> tuple[bool, bool]:
        """Train one step; in a replay, after what the recorded run changed before it.

        Returns whether a stop was requested, and whether all leave the group after it. `order`
        holds the epoch's rows, of which `begun` are taken. The rank's own time is the step's time
        without waiting for other ranks. Raises LossDiverged if the loss diverges.
        """
        rank, state = self.rank, self._state
        self.batch.obey_replay(state, partial(self._train_alone, order, begun))
        started, waited_s, recording_s = (
            time.perf_counter(),
            rank.collective.wait_s,
            self._recording_s,
        )
        rate, noise = self._learning_rate(), rank.noise_scale.value
        rank.learning_rate = rate
        found = rank.step(order, begun, state.step)
        if found.loss is None:
            self._tell_skipped()
        else:
            judge(state, found.loss, rate)
        rank.update(rate)
        parts, own = shares(found.samples, rank.split), found.figures
        common = {
            "step": state.step,
            "epoch": state.epoch,
            "loss": found.loss,
            "learning_rate": rate,
            "noise_scale": math.nan if noise is None else noise,
        }
        # The parameters have changed: whatever happens from now on, the step is not done again.
        self.last = {"row": common, "parts": parts, "members": self._members}
        if found.loss is not None:
            state.epoch_loss_sum += found.loss * found.weight
            state.epoch_weight += found.weight
        state.epoch_samples += found.samples
        state.samples += found.samples
        state.step += 1
        self.batch.before_average(state)
        rank.average_if_due()
        updated = time.perf_counter()
        # Recording a step happens after its row is written, so its time counts for the next step.
        taken_s = updated - started + recording_s
        own_s = taken_s - (rank.collective.wait_s - waited_s)
        self.steps.add(
            **common,
            rank=rank.number,
            device=self.device,
            batch_size=parts[rank.number],
            compute_s=own_s,
            wait_s=own.wait_s,
            communication_s=own.communication_s,
            step_time_s=taken_s,
            samples_per_s=parts[rank.number] / taken_s,
            memory_bytes=own.memory_bytes,
            energy_j=None if math.isnan(own.energy_j) else own.energy_j,
        )
        whole = found.samples == sum(rank.split)  # the last batch of an epoch may be smaller
        if whole:
            self.batch.note(own_s, taken_s)
        rank.actions.end(own_s, whole=whole)
        if rank.first:
            self._show(found, parts, rate, taken_s)
        self._recording_s = time.perf_counter() - updated
        rank.rest_s = own_s - found.own_s - recording_s + self._recording_s
        return found.stop, found.leave

    def _tell_skipped(self) -> None:
        """Say once that a step changes nothing."""
        if self.rank.first and not self._skipped:
            self.channel.send(
                "notice",
                message=f"loss: its weight is 0 in all samples of step {self._state.step}: such "
                "steps change nothing, and have no loss",
            )
        self._skipped = True

    def _learning_rate(self) -> float:
        """The next step's."""
        state, spec = self._state, self.rank.spec
        base = self.rank.request.learning_rate * state.rate_factor
        rate = learning_rate_at(
            state.samples, self.total_samples, base, spec.schedule, spec.warm_up
        )
        return rate * self.batch.rate_factor(state.step)

    def _train_alone(self, order: Any, begun: int, updates: int) -> None:
        """Do this rank's first updates of the next step, which is not finished."""
        self.rank.learning_rate = self._learning_rate()
        self.rank.step_alone(order, begun, self._state.step, updates)

    def _go_back(self, what: str) -> None:
        """Return to the last good checkpoint, or to step 0, with half the learning rate."""
        rank, state = self.rank, self._state
        setbacks, factor = state.setbacks + 1, state.rate_factor / 2
        if setbacks > MOST_SETBACKS:
            raise TrainingFailed(
                f"{what}; training still diverges after {MOST_SETBACKS} restarts from the last "
                "good checkpoint, each at half the learning rate; a lower train.learning_rate or a "
                "train.clip_norm may help",
                final=True,
                step=state.step,
                learning_rate=rank.request.learning_rate * state.rate_factor,
            )
        rank.abandon_step()
        rank.drop_step()
        members, layout = self._members, rank.layout
        take_all(self, 0, return_to_checkpoint(self, members, lambda _: layout))
        rank.adopt(layout)
        rank.cut(members)
        state = self._state
        self._open_writer()
        state.setbacks, state.rate_factor = setbacks, factor
        self.committed = state.step
        reason = f"{what}; back to step {state.step} with {100 * factor:g} % of the learning rate"
        self.batch.go_back(state, members, reason)

    def _show(self, found: StepFigures, parts: list[int], rate: float, taken_s: float) -> None:
        step, speed = self._state.step, found.samples / taken_s
        assert self.writer is not None
        values = {"learning_rate": rate, "samples_per_s": speed}
        if found.loss is not None:
            values["loss/train"] = found.loss
        if (noise := self.rank.noise_scale.value) is not None:
            values["gradient_noise_scale"] = noise
        if self.rank.classifies:
            values["accuracy/train"] = found.correct / found.samples
        # per-rank values only as often as events are written; metrics/ has the rows of every step
        if self.writer.due:
            for number, figures in zip(self._members, self.rank.figures_of_all, strict=True):
                by_rank = {
                    **_known(figures),
                    "samples_per_s": parts[number] / taken_s,
                    "batch_size": parts[number],
                }
                values |= {f"rank-{number}/{name}": value for name, value in by_rank.items()}
        self.writer.add(step, values)
        if not self.channel.due:
            return
        self.channel.progress(
            "train",
            step=step,
            steps=self.total_steps,
            epoch=self._state.epoch,
            epochs=self.rank.spec.epochs,
            loss=found.loss,
            learning_rate=rate,
            samples_per_s=speed,
            batch_sizes=self.rank.split,
            step_time_s=taken_s,
            ranks=[
                {
                    "rank": number,
                    "batch_size": parts[number],
                    "samples_per_s": parts[number] / taken_s,
                    **_known(figures),
                }
                for number, figures in zip(self._members, self.rank.figures_of_all, strict=True)
            ],
        )

    def _end_epoch(self, duration_s: float) -> None:
        """Validate, and check whether the metrics are the best so far, or the training ends."""
        rank, state, stopping = self.rank, self._state, self.rank.spec.early_stopping
        self.batch.before_average(state)
        rank.average()
        validated = rank.validate()
        found = validated.metrics
        score = score_of(deciding_metric(rank.spec, found), found)
        improved = state.best_score is None or score > state.best_score
        ends = stopping is not None and not improved and state.since_best + 1 >= stopping.patience
        improved, ends, best = self._as_first_rank(
            improved, ends, improved or better_tie(score, found, state)
        )
        train_loss = self._train_loss()
        state.epoch_loss_sum, state.epoch_weight, state.epoch_samples = 0.0, 0.0, 0
        state.metrics, state.by_class = {**found, "train_loss": train_loss}, validated.by_class
        state.best, state.since_best = best, 0 if improved else state.since_best + 1
        if best:
            state.best_score = score if math.isfinite(score) else None
            state.best_loss = found.get("loss")
        state.ended = ends and state.samples < self.total_samples
        row = {"epoch": state.epoch, "train_loss": train_loss, **found, "duration_s": duration_s}
        recent = [one for one in state.epochs if one["step"] >= self.saver.stored]
        state.epochs = [*recent, {"step": state.step - 1, **row}]
        if rank.first:
            assert self.writer is not None
            self.writer.add(
                state.step, {f"{name}/validation": value for name, value in found.items()}
            )
            self.channel.send("epoch", epochs=rank.spec.epochs, **row)
            if (stop := self._early_stopped()) is not None:
                self.channel.send("notice", message=f"training {stop['reason']}")

    def _train_loss(self) -> float:
        """The mean of the epoch. Raises BadInput if nothing in it has a weight in the loss."""
        state = self._state
        if not state.epoch_weight:
            raise without_weight(f"{state.epoch_samples} training samples of epoch {state.epoch}")
        return state.epoch_loss_sum / state.epoch_weight

    def _as_first_rank(self, *decisions: bool) -> list[bool]:
        """The first rank's decisions: another processor may round a metric differently."""
        own = torch.tensor(decisions, dtype=torch.float64)
        return (self.rank.collective.sum_(own * self.rank.first, "decisions") > 0).tolist()

    def _early_stopped(self) -> dict[str, Any] | None:
        """Why the training ended early, as JSON; None if it did not."""
        state = self._state
        if not state.ended:
            return None
        return early_stop(
            self.rank.spec,
            state.metrics,
            epochs=state.samples // self.rows,
            since_best=state.since_best,
            best_score=state.best_score,
        ).model_dump()

    def _checkpoint(self, *, last: bool) -> None:
        """Save a checkpoint. Only the last one blocks the training until it is written."""
        rank, state = self.rank, self._state
        if last:
            self.channel.send("saving")  # a stop then allows more time
        self.batch.before_average(state)
        if last and not self._complete:
            self.batch.average(state, "training stops; ranks average what they did alone")
        else:
            rank.average(moments=True)
        rank.take_state_from_first()
        require_finite(rank, state.step)
        rank.join_squares()
        state.split, state.adaptive = list(rank.split), self.batch.document()
        state.layout, state.summed = rank.layout.name, list(self.summed)
        state.duration_s = self.order.earlier_s + time.time() - self.order.started_at_s
        state.best |= self.best_at > self.committed and self.redo
        self.steps.cut()
        self.saver.save(state, last=last)
        if state.best:
            self.best_at = state.step
        self.saved, self.redo, state.best = state.step, False, False


def _known(figures: RankFigures) -> dict[str, float]:
    """A rank's figures, without those that are not measured."""
    names = ("compute_s", "wait_s", "communication_s", "memory_bytes", "energy_j")
    values = {name: float(getattr(figures, name)) for name in names}
    return {name: value for name, value in values.items() if not math.isnan(value)}
