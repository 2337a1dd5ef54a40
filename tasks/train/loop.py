"""The loop over steps: a training from its start or a checkpoint to its end. (The search of the learning rate is `ramp`.)"""

from __future__ import annotations

import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch  # noqa: TID253 - only ranks import this

from trainwright.tasks.artefacts import SplitEvent
from trainwright.tasks.errors import TrainingFailed
from trainwright.tasks.train import checkpoint
from trainwright.tasks.train.adaptive_batch import BatchGrowth, largest_batch, restored, rule_for
from trainwright.tasks.train.agree import agree, begin, take_all
from trainwright.tasks.train.batches import epoch_order, shares, split_among, steps_left
from trainwright.tasks.train.channel import Channel, usage_of_this_process
from trainwright.tasks.train.divergence import RanAway, judge, require_finite
from trainwright.tasks.train.fence import Fence
from trainwright.tasks.train.figures import RankFigures
from trainwright.tasks.train.launcher_store import journal_of, store_of
from trainwright.tasks.train.metrics import Rows, drop_from
from trainwright.tasks.train.optimization import learning_rate_at
from trainwright.tasks.train.rank import Rank, StepFigures
from trainwright.tasks.train.rebalance import Rebalancer
from trainwright.tasks.train.request import Order
from trainwright.tasks.train.saver import Saver
from trainwright.tasks.train.tensorboard import Events
from trainwright.tasks.train.world import World

WINDOW_STEPS = 20
WINDOW_S = 1.5  # shorter windows measure the machine's noise
MOST_SETBACKS = 3


class Training:
    """The loop over epochs. It outlives the worlds in which it takes part."""

    def __init__(self, rank: Rank, channel: Channel, order: Order) -> None:
        self.rank, self.channel, self.order = rank, channel, order
        self.store, self.work = store_of(order, channel), Path(rank.request.work_folder)
        self.steps = Rows(self.store, f"steps-rank{rank.number}", journal_of(order, channel, rank.number))
        # Every rank has these, in case the first is lost.
        self.epochs, self.splits = (Rows(self.store, kind, by_step=True) for kind in ("epochs", "splits"))
        self.rows = len(rank.train_rows)
        self.total_samples = self.rows * rank.spec.epochs
        self.state: checkpoint.State | None = None
        self.weights = [float(planned.batch_size) for planned in rank.request.plan.devices]
        """in what proportion those who are there share the batch"""
        self.last: dict[str, Any] | None = None
        """the step that was finished last, as every rank saw it"""
        self.committed = 0
        """the step of the newest checkpoint that was in the store when the world began"""
        self.saved, self.best_at, self.redo = 0, 0, False
        """the steps of the newest checkpoint that was begun, and of the newest that was the best; whether it takes another,
        because a rank was lost while one was being written"""
        self.saver = Saver(rank, channel, order, [self.steps], [self.epochs, self.splits])
        self.limits: dict[int, int] = {}
        self.replay = {event.step: event for event in rank.request.replay_events or []}
        self.rebalancer: Rebalancer | None = None
        self.growth: BatchGrowth | None = None
        """where the job lets the global batch grow"""
        self.recent_s: list[float] = []
        self.recent_steps_s: list[float] = []
        self._recording_s = 0.0
        """what noting the step before took"""
        self.writer: Events | None = None

    @property
    def finished(self) -> int | None:
        """How many steps this rank has finished; None before it has a state."""
        return self.state.step if self.state is not None else None

    @property
    def total_steps(self) -> int:
        """Steps of the whole training, if the batch stays as it is."""
        state = self._state
        return state.step + steps_left(state.samples, self.rows, self.rank.spec.epochs, sum(self.rank.split))

    def adaptive(self) -> dict[str, Any]:
        """The noise scale, and the batch's growth where the job lets it grow: for a checkpoint, and for other ranks."""
        growth = {"growth": self.growth.document()} if self.growth is not None else {}
        return {"noise": self.rank.noise_document(), **growth}

    def take_up(self, adaptive: dict[str, Any]) -> None:
        """Go on from what `adaptive` said; anew where it said nothing."""
        spec, planned = self.rank.spec, self.rank.request.plan.devices
        self.growth = None
        if "growth" in adaptive:
            self.growth = restored(adaptive["growth"])
        elif spec.adaptive_batch:
            base = sum(device.batch_size for device in planned)
            self.growth = BatchGrowth(base, base, rule_for(spec.learning_rate_rule, spec.optimizer.name))
        if adaptive:
            self.rank.load_noise(adaptive["noise"])

    def take_part(self, world: World) -> dict[str, Any] | None:
        """Train with the members of a world; what this rank says at the end, or None where all leave it between steps."""
        self.enter(world)
        return self._run(stopped=world.end)

    def enter(self, world: World) -> None:
        """Come to one state with the members of a world, and to each one's batch."""
        self.committed, self.limits = world.committed, world.limits
        agree(self, world)
        self._share_out(world)
        self._open_writer()

    def _share_out(self, world: World) -> None:
        """The members' batches, and what they can be from now on."""
        state, stays = self._state, self._stays(world.members)
        self.rank.split = list(state.split)
        if self._before != world.members and self.growth is not None:
            self.growth.forget_times()
        if not stays:
            self._change_split(self._split_among(world.members), world.reason)
        state.members = world.members
        self._weigh_anew()

    @property
    def _before(self) -> list[int]:
        """The members that the state's split is for."""
        state = self._state
        return state.members if state.members is not None else list(range(len(state.split)))

    def _stays(self, members: list[int]) -> bool:
        """Whether the state's split is for these members, and within their limits; or a replay says what they take."""
        state = self._state
        if self.rank.request.replay_events is not None and len(members) == len(state.split):
            return True
        within = all(state.split[number] <= limit for number, limit in self.limits.items())
        return self._before == members and within

    def _split_among(self, members: list[int]) -> list[int]:
        """The state's global batch among these members; less of it where it had grown and their memory does not hold it."""
        total = sum(self._state.split)
        if self.growth is not None:
            total = max(self.growth.base, min(total, sum(self.limits.get(number, total) for number in members)))
        split = split_among(total, members, self.weights, self.limits)
        if split is None:
            raise TrainingFailed("the members' memory does not hold the global batch", final=True)
        return split

    def _weigh_anew(self) -> None:
        rank, spec, members = self.rank, self.rank.spec, self._members
        split, limits = [rank.split[number] for number in members], [self._most(number) for number in members]
        adapts = spec.adaptive_split and rank.request.replay_events is None and len(members) > 1
        self.rebalancer = Rebalancer(list(split), limits) if adapts and min(split) > 0 else None
        if self.growth is not None:
            bound = min(spec.batch_bounds[1], self.rows)
            self.growth.most = largest_batch(split, limits, bound, follows_speed=self.rebalancer is not None)
        self.recent_s, self.recent_steps_s = [], []

    def _most(self, number: int) -> int | None:
        """The largest batch of a device, as planned and as it was seen; None: not known."""
        known = [self.rank.request.plan.devices[number].most_batch_size, self.limits.get(number)]
        return min((limit for limit in known if limit is not None), default=None)

    @property
    def _state(self) -> checkpoint.State:
        assert self.state is not None
        return self.state

    @property
    def _members(self) -> list[int]:
        return self._state.members or []

    def _open_writer(self) -> None:
        if not self.rank.first:
            if self.writer is not None:
                self.writer.close()
            self.writer = None
        elif self.writer is None:
            self.writer = Events(self.work / "events", self._state.step or None)

    def _run(self, stopped: bool) -> dict[str, Any] | None:
        rank, spec = self.rank, self.rank.spec
        leave, order, ordered_for, epoch_started = False, None, -1, time.perf_counter()
        stepped = False
        while True:
            try:
                self._finish_step(stopped, time.perf_counter() - epoch_started)
                state = self._state
                if stopped or state.samples == self.total_samples:
                    break
                if stepped:
                    self._rebalance()
                if leave:
                    return None
                state.epoch, begun = divmod(state.samples, self.rows)
                if state.epoch != ordered_for:
                    order, ordered_for = epoch_order(rank.train_rows, spec.seed, state.epoch), state.epoch
                    epoch_started = time.perf_counter()
                self._obey_replay()
                stopped, leave = self.step(order, begun)
                stepped = True
            except RanAway as error:
                self._go_back(str(error))
                stopped = leave = stepped = False
        if self.writer is not None:
            self.writer.close()
            self.writer = None
        return {
            "stopped": stopped and state.samples < self.total_samples, "step": state.step, "metrics": state.metrics,
            "events": state.events, "split": rank.split, "duration_s": state.duration_s,
            "noise_scale": rank.noise_scale.value, **usage_of_this_process(),
        }  # fmt: skip

    def _finish_step(self, stopped: bool, epoch_s: float) -> None:
        """What is due after a step. A rank that is lost meanwhile ends it; the next world then begins with it again."""
        state, policy = self._state, self.rank.spec.checkpoint
        last = stopped or state.samples == self.total_samples
        if state.samples % self.rows == 0 and state.epoch_samples > 0:
            self._end_epoch(epoch_s)
        due = self.redo or state.step % policy.every_steps == 0 or (state.best and policy.keep_best)
        if (last and state.step > self.committed) or (due and state.step > self.saved):
            self._checkpoint(last=last)

    def _obey_replay(self) -> None:
        event = self.replay.get(self._state.step)
        if event is None or event.model_dump() in self._state.events:
            return
        split = list(event.batch_sizes)
        if any(size > 0 and number not in self._members for number, size in enumerate(split)):
            weights = [float(size) for size in split]
            split = split_among(sum(split), self._members, weights, self.limits) or self.rank.split
        self._change_split(split, event.reason)

    def step(self, order: Any, begun: int) -> tuple[bool, bool]:
        """One step; whether somebody asked to stop, and whether the world ends after it. Raises RanAway.

        `order` holds the epoch's rows, `begun` of them taken. Its own time is all of it but what it waits for the others.
        """
        rank, state = self.rank, self._state
        started, waited_s = time.perf_counter() - self._recording_s, rank.collective.wait_s
        base = rank.request.learning_rate * state.rate_factor
        rate = learning_rate_at(state.samples, self.total_samples, base, rank.spec.schedule)
        noise = rank.noise_scale.value
        if self.growth is not None:
            rate *= self.growth.factor(state.step, noise)
        found = rank.step(order, begun, state.step)
        judge(state, found.loss, rate)
        rank.update(rate)
        updated = time.perf_counter()
        taken_s = updated - started
        own_s = taken_s - (rank.collective.wait_s - waited_s)
        rank.rest_s = own_s - found.own_s
        parts, own = shares(found.samples, rank.split), found.figures
        common = {
            "step": state.step, "epoch": state.epoch, "loss": found.loss, "learning_rate": rate,
            "noise_scale": math.nan if noise is None else noise,
        }  # fmt: skip
        self.last = {"row": common, "parts": parts, "members": self._members}
        self.steps.add(
            **common, rank=rank.number, batch_size=parts[rank.number], compute_s=own_s, wait_s=own.wait_s,
            communication_s=own.communication_s, step_time_s=taken_s, samples_per_s=parts[rank.number] / taken_s,
            memory_bytes=own.memory_bytes, energy_j=None if math.isnan(own.energy_j) else own.energy_j,
        )  # fmt: skip
        if found.samples == sum(rank.split):
            self.recent_s.append(own_s)
            self.recent_steps_s.append(taken_s)
        state.epoch_loss_sum += found.loss * found.samples
        state.epoch_samples += found.samples
        state.samples += found.samples
        state.step += 1
        if rank.first:
            self._show(found, parts, rate, taken_s)
        self._recording_s = time.perf_counter() - updated
        return found.stop, found.leave

    def _go_back(self, what: str) -> None:
        """To the last good checkpoint, or the beginning, with half the learning rate."""
        rank, state = self.rank, self._state
        setbacks, factor = state.setbacks + 1, state.rate_factor / 2
        if setbacks > MOST_SETBACKS:
            raise TrainingFailed(
                f"{what}, after {MOST_SETBACKS} returns to the last good checkpoint, each with half the learning rate; a lower "
                "train.learning_rate or a train.clip_norm may help",
                final=True, step=state.step, learning_rate=rank.request.learning_rate * state.rate_factor,
            )  # fmt: skip
        rank.abandon_step()
        members, folder, read = self._members, self.work / "setback", None
        self.saver.settle()
        rank.collective.sum_(torch.zeros(1), "settled")
        if rank.first:
            read = checkpoint.fetch_latest(self.store, folder)
        begin(self, str(folder) if read is not None else None)
        take_all(self, 0)
        state = self._state
        self.saver.forget_from(state.step)
        self.steps.forget_from(state.step)
        if rank.first:
            Fence(self.store, self.order.claim).forget(after=state.step if read is not None else -1)
            drop_from(self.store, state.step)
            self.channel.send("back", step=state.step)
            assert self.writer is not None
            self.writer.close()
            self.writer = None
        self._open_writer()
        rank.split = list(state.split) if self._stays(members) else self._split_among(members)
        state.members, state.setbacks, state.rate_factor = members, setbacks, factor
        self.committed = state.step
        self._weigh_anew()
        self._change_split(
            rank.split, f"{what}; back to step {state.step} with {100 * factor:g} % of the learning rate"
        )

    def _show(self, found: StepFigures, parts: list[int], rate: float, taken_s: float) -> None:
        step, speed = self._state.step, found.samples / taken_s
        assert self.writer is not None
        values = {"loss/train": found.loss, "learning_rate": rate, "samples_per_s": speed}
        if (noise := self.rank.noise_scale.value) is not None:
            values["gradient_noise_scale"] = noise
        if self.rank.classifies:
            values["accuracy/train"] = found.correct / found.samples
        if self.writer.due:  # of each rank, as often as events are written; the rows under metrics/ have every step
            for number, figures in zip(self._members, self.rank.figures_of_all, strict=True):
                by_rank = {**_known(figures), "samples_per_s": parts[number] / taken_s, "batch_size": parts[number]}
                values |= {f"rank-{number}/{name}": value for name, value in by_rank.items()}
        self.writer.add(step, values)
        if not self.channel.due:
            return
        self.channel.progress(
            "train", step=step, steps=self.total_steps, epoch=self._state.epoch, epochs=self.rank.spec.epochs,
            loss=found.loss, learning_rate=rate, samples_per_s=speed, batch_sizes=self.rank.split, step_time_s=taken_s,
            ranks=[
                {"rank": number, "batch_size": parts[number], "samples_per_s": parts[number] / taken_s, **_known(figures)}
                for number, figures in zip(self._members, self.rank.figures_of_all, strict=True)
            ],
        )  # fmt: skip

    def _end_epoch(self, duration_s: float) -> None:
        """Validate, and see whether the metrics are the best so far."""
        rank, state = self.rank, self._state
        found = rank.validate()
        train_loss = state.epoch_loss_sum / state.epoch_samples
        state.epoch_loss_sum, state.epoch_samples = 0.0, 0
        state.metrics = {**found, "train_loss": train_loss}
        target = rank.spec.target.metric if rank.spec.target is not None else "accuracy"
        score = found[target] if target in found and target != "loss" else -found["loss"]
        state.best = state.best_score is None or score > state.best_score
        if state.best:
            state.best_score = score if math.isfinite(score) else None
        row = {"epoch": state.epoch, "train_loss": train_loss, **found, "duration_s": duration_s}
        self.epochs.add(step=state.step - 1, **row)
        if rank.first:
            assert self.writer is not None
            self.writer.add(state.step, {f"{name}/validation": value for name, value in found.items()})
            self.channel.send("epoch", epochs=rank.spec.epochs, **row)

    def _checkpoint(self, *, last: bool) -> None:
        """Training goes on while it is written, but for the last."""
        rank, state = self.rank, self._state
        if last:
            self.channel.send("saving")  # who asked for a stop gives this its time
        rank.take_state_from_first()
        require_finite(rank.model, state.step)
        state.split, state.adaptive = list(rank.split), self.adaptive()
        state.duration_s = self.order.earlier_s + time.time() - self.order.started_at_s
        state.best |= self.best_at > self.committed and self.redo
        self.saver.save(state, last=last)
        if state.best:
            self.best_at = state.step
        self.saved, self.redo, state.best = state.step, False, False

    def _rebalance(self) -> None:
        """Every so often, compare the members' own times and weigh a larger batch; change the split where it pays."""
        rank, peers, members = self.rank, self.rank.collective, self._members
        grows = self.growth is not None and rank.request.replay_events is None
        if not (self.rebalancer or grows) or self._state.step % WINDOW_STEPS != 0:
            return
        figures = torch.zeros(peers.size + 2, dtype=torch.float64)
        figures[peers.rank] = statistics.median(self.recent_s) if self.recent_s else 0.0
        figures[-2] = statistics.median(self.recent_steps_s) if self.recent_steps_s and rank.first else 0.0
        figures[-1] = sum(self.recent_s)
        *medians_s, step_time_s, worked_s = peers.sum_(figures, "medians").tolist()
        if worked_s < WINDOW_S * peers.size:  # by all ranks together
            return
        self.recent_s, self.recent_steps_s = [], []
        better = self.rebalancer.observe(medians_s) if self.rebalancer is not None else None
        if better is None and grows:
            better = self._grown(step_time_s)
        if better is not None:
            split, known = [0] * len(rank.split), sum(self.weights[number] for number in members)
            for number, size in zip(members, better[0], strict=True):
                split[number], self.weights[number] = size, known * size / sum(better[0])
            self._change_split(split, better[1])

    def _grown(self, step_time_s: float) -> tuple[list[int], str] | None:
        """The members' split of a better global batch, and the reason."""
        assert self.growth is not None
        found = self.growth.observe(step_time_s, self.rank.noise_scale.value)
        if found is None:
            return None
        batch, reason = found
        if self.rebalancer is not None:
            return self.rebalancer.resized(batch), reason
        return shares(batch, [self.rank.split[number] for number in self._members]), reason

    def _change_split(self, split: list[int], reason: str) -> None:
        event = SplitEvent(step=self._state.step, batch_sizes=split, reason=reason).model_dump()
        if self.growth is not None:
            self.growth.change(sum(split), self._state.step, self.rank.noise_scale.value)
        self.rank.split, self._state.split = list(split), list(split)
        self.recent_s, self.recent_steps_s = [], []
        self._state.events.append(event)
        self.splits.add(**event)
        if self.rank.first:
            self.channel.send("split", **event)


def _known(figures: RankFigures) -> dict[str, float]:
    """A rank's figures, without what no meter measures."""
    names = ("compute_s", "wait_s", "communication_s", "memory_bytes", "energy_j")
    values = {name: float(getattr(figures, name)) for name in names}
    return {name: value for name, value in values.items() if not math.isnan(value)}
