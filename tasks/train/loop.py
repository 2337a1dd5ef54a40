"""The loops over steps: a training from its start or a checkpoint to its end, and the ramp of the learning rate."""

from __future__ import annotations

import math
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import torch  # noqa: TID253 - only ranks import this

from trainwright.tasks.artefacts import SplitEvent
from trainwright.tasks.errors import TrainingFailed
from trainwright.tasks.train import checkpoint
from trainwright.tasks.train.batches import epoch_order, shares, steps_per_epoch
from trainwright.tasks.train.channel import RankChannel
from trainwright.tasks.train.metrics import Rows
from trainwright.tasks.train.optimization import learning_rate_at
from trainwright.tasks.train.rank import Rank, StepFigures
from trainwright.tasks.train.rebalance import Rebalancer
from trainwright.tasks.train.request import Order
from trainwright.tasks.train.saver import Saver
from trainwright.tasks.train.tensors import load_optimizer

WINDOW_STEPS = 20
WINDOW_S = 1.5  # shorter windows measure the machine's noise
DIVERGED = 4.0
SMOOTHING = 0.9


def ramp(rank: Rank, channel: RankChannel, learning_rates: list[float]) -> dict[str, Any]:
    """Raise the learning rate step by step; loss and accuracy before each update, until the loss runs away."""
    points: list[dict[str, Any]] = []
    per_epoch = steps_per_epoch(len(rank.train_rows), sum(rank.split))
    smoothed, best = 0.0, math.inf
    for step, rate in enumerate(learning_rates):
        order = epoch_order(rank.train_rows, rank.spec.seed, step // per_epoch)
        found = rank.step(order, step % per_epoch, step)
        if found.stop:
            break
        accuracy = found.correct / found.samples if rank.classifies else None
        points.append({"learning_rate": rate, "loss": found.loss, "accuracy": accuracy})
        if not math.isfinite(found.loss):
            break
        smoothed = SMOOTHING * smoothed + (1 - SMOOTHING) * found.loss
        unbiased = smoothed / (1 - SMOOTHING ** (step + 1))
        best = min(best, unbiased)
        if unbiased > DIVERGED * best:
            break
        rank.update(rate)
        if rank.rank == 0:
            channel.progress("ramp", step=step + 1, steps=len(learning_rates), learning_rate=rate, loss=found.loss)
    return {"points": points}


class Training:
    """The loop over epochs."""

    def __init__(self, rank: Rank, channel: RankChannel, order: Order) -> None:
        self.rank, self.channel, self.started_at_s = rank, channel, order.started_at_s
        self.store = store = order.request.store()
        self.first = rank.rank == 0
        self.steps = Rows(store, f"steps-rank{rank.rank}")
        self.epochs, self.splits = Rows(store, "epochs"), Rows(store, "splits")
        self.per_epoch = steps_per_epoch(len(rank.train_rows), sum(rank.split))
        self.total_steps = self.per_epoch * rank.spec.epochs
        self.state = checkpoint.State(step=0, epoch=0, split=rank.split)
        if order.checkpoint is not None:
            self.state, model, optimizer = checkpoint.read_local(Path(order.checkpoint))
            rank.load_state(model)
            load_optimizer(rank.optimizer, optimizer)
            if len(self.state.split) == rank.size:
                rank.split = list(self.state.split)
        self.earlier_s = self.state.duration_s
        replay = rank.request.replay_events
        self.replay = {event.step: event for event in replay or []}
        adapts = rank.spec.adaptive_split and replay is None and rank.size > 1
        self.rebalancer = Rebalancer(list(rank.split)) if adapts else None
        self.recent_s: list[float] = []
        self.saver = Saver(rank, channel, order, [self.steps, self.epochs, self.splits])
        self.writer: Any = None
        if self.first:
            from torch.utils.tensorboard import SummaryWriter

            events = Path(rank.request.work_folder) / "events"
            self.writer = SummaryWriter(str(events), purge_step=self.state.step or None, flush_secs=5)

    def run(self) -> dict[str, Any]:
        """Train until the end, or until somebody asks to stop; what this rank says of it."""
        rank, state, spec = self.rank, self.state, self.rank.spec
        order, stopped, epoch_started = None, False, time.perf_counter()
        while state.step < self.total_steps and not stopped:
            state.epoch, step_in_epoch = divmod(state.step, self.per_epoch)
            if order is None or step_in_epoch == 0:
                order, epoch_started = epoch_order(rank.train_rows, spec.seed, state.epoch), time.perf_counter()
            if state.step in self.replay:
                self._change_split(self.replay[state.step].batch_sizes, self.replay[state.step].reason)
            stopped = self._step(order, step_in_epoch)
            due = stopped or state.step == self.total_steps or state.step % spec.checkpoint.every_steps == 0
            if state.step % self.per_epoch == 0:
                is_best = self._end_epoch(time.perf_counter() - epoch_started)
                due = due or (is_best and spec.checkpoint.keep_best)
            if due:
                self._checkpoint(last=stopped or state.step == self.total_steps)
            self._rebalance()
        if self.writer is not None:
            self.writer.close()
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "stopped": stopped and state.step < self.total_steps, "step": state.step, "metrics": state.metrics,
            "events": state.events, "split": rank.split, "duration_s": state.duration_s,
            "peak_memory_bytes": usage.ru_maxrss * 1024, "cpu_s": usage.ru_utime + usage.ru_stime,
        }  # fmt: skip

    def _step(self, order: Any, step_in_epoch: int) -> bool:
        """One step; whether somebody asked to stop."""
        rank, state = self.rank, self.state
        started, waited = time.perf_counter(), rank.collective.wait_s
        rate = learning_rate_at(state.step, self.total_steps, rank.request.learning_rate, rank.spec.schedule)
        found = rank.step(order, step_in_epoch, state.step)
        if not math.isfinite(found.loss):
            raise TrainingFailed(f"the loss is {found.loss} at step {state.step} (learning rate {rate:.3g})")
        own_s = found.own_s + rank.update(rate)
        taken_s = time.perf_counter() - started
        batch = shares(found.samples, rank.split)[rank.rank]
        self.steps.add(
            step=state.step, epoch=state.epoch, rank=rank.rank, batch_size=batch, loss=found.loss, learning_rate=rate,
            compute_s=own_s, wait_s=rank.collective.wait_s - waited, step_time_s=taken_s,
        )  # fmt: skip
        if found.samples == sum(rank.split):
            self.recent_s.append(own_s)
        state.epoch_loss_sum += found.loss * found.samples
        state.epoch_samples += found.samples
        state.step += 1
        if self.first:
            self._show(found, rate, taken_s)
        return found.stop

    def _show(self, found: StepFigures, rate: float, taken_s: float) -> None:
        step, speed = self.state.step, found.samples / taken_s
        self.writer.add_scalar("loss/train", found.loss, step)
        self.writer.add_scalar("learning_rate", rate, step)
        self.writer.add_scalar("samples_per_s", speed, step)
        if self.rank.classifies:
            self.writer.add_scalar("accuracy/train", found.correct / found.samples, step)
        self.channel.progress(
            "train", step=step, steps=self.total_steps, epoch=self.state.epoch, epochs=self.rank.spec.epochs,
            loss=found.loss, samples_per_s=speed, batch_sizes=self.rank.split,
        )  # fmt: skip

    def _end_epoch(self, duration_s: float) -> bool:
        """Validate; whether the metrics are the best so far."""
        rank, state = self.rank, self.state
        train_loss = state.epoch_loss_sum / state.epoch_samples
        state.epoch_loss_sum, state.epoch_samples = 0.0, 0
        found = rank.validate()
        state.metrics = {**found, "train_loss": train_loss}
        target = rank.spec.target.metric if rank.spec.target is not None else "accuracy"
        score = found[target] if target in found and target != "loss" else -found["loss"]
        state.best = state.best_score is None or score > state.best_score
        if state.best:
            state.best_score = score if math.isfinite(score) else None
        if self.first:
            row = {"epoch": state.epoch, "train_loss": train_loss, **found, "duration_s": duration_s}
            self.epochs.add(step=state.step - 1, **row)
            for name, value in found.items():
                self.writer.add_scalar(f"{name}/validation", value, state.step)
            self.channel.send("epoch", epochs=rank.spec.epochs, **row)
        return state.best

    def _checkpoint(self, *, last: bool) -> None:
        """Training goes on while it is written, but for the last."""
        rank, state = self.rank, self.state
        if last:
            self.channel.send("saving")  # who asked for a stop gives this its time
        rank.take_state_from_first()
        state.split = list(rank.split)
        state.duration_s = self.earlier_s + time.time() - self.started_at_s
        self.saver.save(state, last=last)
        state.best = False

    def _rebalance(self) -> None:
        """Every so often, compare the ranks' own times, and change the split where it pays."""
        rank, step = self.rank, self.state.step
        if self.rebalancer is None or step % WINDOW_STEPS != 0 or step == self.total_steps:
            return
        figures = torch.zeros(rank.size + 1, dtype=torch.float64)
        figures[rank.rank] = statistics.median(self.recent_s) if self.recent_s else 0.0
        figures[-1] = sum(self.recent_s)
        *medians_s, worked_s = rank.collective.sum_(figures, "medians").tolist()
        if worked_s < WINDOW_S * rank.size:  # by all ranks together
            return
        self.recent_s = []
        better = self.rebalancer.observe(medians_s)
        if better is not None:
            self._change_split(*better)

    def _change_split(self, split: list[int], reason: str) -> None:
        event = SplitEvent(step=self.state.step, batch_sizes=split, reason=reason).model_dump()
        self.rank.split = list(split)
        self.recent_s = []
        self.state.events.append(event)
        if self.first:
            self.splits.add(**event)
            self.channel.send("split", **event)
