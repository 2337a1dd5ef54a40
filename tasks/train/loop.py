"""The loop over steps: a training from its start or a checkpoint to its end. (The ramp of the learning rate is `ramp`.)"""

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
from trainwright.tasks.train.adaptive_batch import BatchGrowth, largest_batch, restored, rule_for
from trainwright.tasks.train.batches import epoch_order, samples_after, shares, steps_left
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


class Training:
    """The loop over epochs."""

    def __init__(self, rank: Rank, channel: RankChannel, order: Order) -> None:
        self.rank, self.channel, self.started_at_s = rank, channel, order.started_at_s
        self.store = store = order.request.store()
        self.first = rank.rank == 0
        self.steps = Rows(store, f"steps-rank{rank.rank}")
        self.epochs, self.splits = Rows(store, "epochs"), Rows(store, "splits")
        self.rows = len(rank.train_rows)
        self.total_samples = self.rows * rank.spec.epochs
        self.state = checkpoint.State(step=0, epoch=0, samples=0, split=rank.split)
        self.limits = [device.most_batch_size for device in rank.request.plan.devices]
        self.growth = self._growth()
        if order.checkpoint is not None:
            self.state, model, optimizer = checkpoint.read_local(Path(order.checkpoint))
            if self.state.samples < 0:  # such a training's batch never changed
                self.state.samples = samples_after(self.state.step, self.rows, sum(self.state.split))
            rank.load_state(model)
            load_optimizer(rank.optimizer, optimizer)
            if len(self.state.split) == rank.size:
                rank.split = list(self.state.split)
            if self.state.adaptive:
                rank.load_noise(self.state.adaptive["noise"])
                if "growth" in self.state.adaptive:
                    self.growth = restored(self.state.adaptive["growth"])
        self.earlier_s = self.state.duration_s
        replay = rank.request.replay_events
        self.replay = {event.step: event for event in replay or []}
        adapts = rank.spec.adaptive_split and replay is None and rank.size > 1
        self.rebalancer = Rebalancer(list(rank.split), self.limits) if adapts else None
        self.recent_s: list[float] = []
        self.recent_steps_s: list[float] = []
        self.saver = Saver(rank, channel, order, [self.steps, self.epochs, self.splits])
        self.writer: Any = None
        if self.first:
            from torch.utils.tensorboard import SummaryWriter

            events = Path(rank.request.work_folder) / "events"
            self.writer = SummaryWriter(str(events), purge_step=self.state.step or None, flush_secs=5)

    def _growth(self) -> BatchGrowth | None:
        """What lets the global batch grow, where the job wants it."""
        rank, spec = self.rank, self.rank.spec
        if not spec.adaptive_batch:
            return None
        bound = min(spec.batch_bounds[1], self.rows)
        most = largest_batch(rank.split, self.limits, bound, follows_speed=spec.adaptive_split)
        return BatchGrowth(sum(rank.split), most, rule_for(spec.learning_rate_rule, spec.optimizer.name))

    @property
    def total_steps(self) -> int:
        """Steps of the whole training, if the batch stays as it is."""
        return self.state.step + steps_left(self.state.samples, self.rows, self.rank.spec.epochs, sum(self.rank.split))

    def run(self) -> dict[str, Any]:
        """Train until the end, or until somebody asks to stop; what this rank says of it."""
        rank, state, spec = self.rank, self.state, self.rank.spec
        order, stopped, epoch_started = None, False, time.perf_counter()
        while state.samples < self.total_samples and not stopped:
            state.epoch, begin = divmod(state.samples, self.rows)
            if order is None or begin == 0:
                order, epoch_started = epoch_order(rank.train_rows, spec.seed, state.epoch), time.perf_counter()
            if state.step in self.replay:
                self._change_split(self.replay[state.step].batch_sizes, self.replay[state.step].reason)
            stopped = self._step(order, begin)
            due = stopped or state.samples == self.total_samples or state.step % spec.checkpoint.every_steps == 0
            if state.samples % self.rows == 0:
                is_best = self._end_epoch(time.perf_counter() - epoch_started)
                due = due or (is_best and spec.checkpoint.keep_best)
            if due:
                self._checkpoint(last=stopped or state.step == self.total_steps)
            self._rebalance()
        if self.writer is not None:
            self.writer.close()
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "stopped": stopped and state.samples < self.total_samples, "step": state.step, "metrics": state.metrics,
            "events": state.events, "split": rank.split, "duration_s": state.duration_s,
            "peak_memory_bytes": usage.ru_maxrss * 1024, "cpu_s": usage.ru_utime + usage.ru_stime,
            "noise_scale": rank.noise_scale.value,
        }  # fmt: skip

    def _step(self, order: Any, begin: int) -> bool:
        """One step; whether somebody asked to stop."""
        rank, state = self.rank, self.state
        started, waited = time.perf_counter(), rank.collective.wait_s
        rate = learning_rate_at(state.samples, self.total_samples, rank.request.learning_rate, rank.spec.schedule)
        noise = rank.noise_scale.value
        if self.growth is not None:
            rate *= self.growth.factor(state.step, noise)
        found = rank.step(order, begin, state.step)
        if not math.isfinite(found.loss):
            raise TrainingFailed(f"the loss is {found.loss} at step {state.step} (learning rate {rate:.3g})")
        own_s = found.own_s + rank.update(rate)
        taken_s = time.perf_counter() - started
        batch = shares(found.samples, rank.split)[rank.rank]
        self.steps.add(
            step=state.step, epoch=state.epoch, rank=rank.rank, batch_size=batch, loss=found.loss, learning_rate=rate,
            compute_s=own_s, wait_s=rank.collective.wait_s - waited, step_time_s=taken_s,
            noise_scale=math.nan if noise is None else noise,
        )  # fmt: skip
        if found.samples == sum(rank.split):
            self.recent_s.append(own_s)
            self.recent_steps_s.append(taken_s)
        state.epoch_loss_sum += found.loss * found.samples
        state.epoch_samples += found.samples
        state.samples += found.samples
        state.step += 1
        if self.first:
            self._show(found, rate, taken_s)
        return found.stop

    def _show(self, found: StepFigures, rate: float, taken_s: float) -> None:
        step, speed = self.state.step, found.samples / taken_s
        self.writer.add_scalar("loss/train", found.loss, step)
        self.writer.add_scalar("learning_rate", rate, step)
        self.writer.add_scalar("samples_per_s", speed, step)
        if (noise := self.rank.noise_scale.value) is not None:
            self.writer.add_scalar("gradient_noise_scale", noise, step)
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
        growth = {"growth": self.growth.document()} if self.growth is not None else {}
        state.adaptive = {"noise": rank.noise_document(), **growth}
        state.duration_s = self.earlier_s + time.time() - self.started_at_s
        self.saver.save(state, last=last)
        state.best = False

    def _rebalance(self) -> None:
        """Every so often, compare the ranks' own times and weigh a larger batch; change the split where it pays."""
        rank, state = self.rank, self.state
        idle = self.rebalancer is None and (self.growth is None or bool(self.replay))
        if idle or state.step % WINDOW_STEPS != 0 or state.samples == self.total_samples:
            return
        figures = torch.zeros(rank.size + 2, dtype=torch.float64)
        figures[rank.rank] = statistics.median(self.recent_s) if self.recent_s else 0.0
        figures[-2] = statistics.median(self.recent_steps_s) if self.recent_steps_s and self.first else 0.0
        figures[-1] = sum(self.recent_s)
        *medians_s, step_time_s, worked_s = rank.collective.sum_(figures, "medians").tolist()
        if worked_s < WINDOW_S * rank.size:  # by all ranks together
            return
        self.recent_s, self.recent_steps_s = [], []
        better = self.rebalancer.observe(medians_s) if self.rebalancer is not None else None
        if better is None and self.growth is not None:
            better = self._grown(step_time_s)
        if better is not None:
            self._change_split(*better)

    def _grown(self, step_time_s: float) -> tuple[list[int], str] | None:
        """The split of a better global batch, and the reason."""
        assert self.growth is not None
        found = self.growth.observe(step_time_s, self.rank.noise_scale.value)
        if found is None:
            return None
        batch, reason = found
        if self.rebalancer is None:
            return shares(batch, self.rank.split), reason
        return self.rebalancer.resized(batch), reason

    def _change_split(self, split: list[int], reason: str) -> None:
        event = SplitEvent(step=self.state.step, batch_sizes=split, reason=reason).model_dump()
        if self.growth is not None:
            self.growth.change(sum(split), self.state.step, self.rank.noise_scale.value)
        self.rank.split = list(split)
        self.recent_s, self.recent_steps_s = [], []
        self.state.events.append(event)
        if self.first:
            self.splits.add(**event)
            self.channel.send("split", **event)
