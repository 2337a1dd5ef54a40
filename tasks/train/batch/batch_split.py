"""Splits the global batch over ranks: by the plan, by measured speed, or as a replay dictates.

The split changes when ranks join or leave, when their speed changes, and when the batch grows.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch  # noqa: TID253 - only ranks import this

from trainwright.tasks.errors import TrainingFailed
from trainwright.tasks.runs.artefacts.layout import Layout
from trainwright.tasks.runs.artefacts.training_result import GroupAverage, SplitEvent, layout_since
from trainwright.tasks.train.batch.adaptive_batch import (
    BatchGrowth,
    largest_batch,
    mean_step_time_s,
    restored,
    rule_for,
)
from trainwright.tasks.train.batch.rebalance import Rebalancer
from trainwright.tasks.train.batch.recorded_events import RecordedEvents, document_of
from trainwright.tasks.train.batch.sampling import shares, split_among, steps_left

if TYPE_CHECKING:
    from trainwright.tasks.train.channel import Channel
    from trainwright.tasks.train.checkpoint.files import CheckpointState
    from trainwright.tasks.train.rank.rank import Rank
    from trainwright.tasks.train.worker_group import WorkerGroup

TrainAlone = Callable[[int], object]

WINDOW_STEPS, WINDOW_S = 20, 1.5
"""The least length of a measuring window, WINDOW_S as the mean over ranks; less is only noise."""
EARLY_WINDOW = 0.1
"""For batch growth, a window of this share of the training so far is enough.

Otherwise a short training would end before its batch could grow.
"""


class BatchSplit:
    """One rank's view of the batch split.

    All ranks hold the same state and make the same decision. Each change is recorded as an event
    with its reason.
    """

    def __init__(self, rank: Rank, channel: Channel) -> None:
        self._rank, self._channel = rank, channel
        self.weights = [float(share) for share in rank.request.plan.shares]
        """by device: the proportions in which the current members share the batch"""
        self._limits: dict[int, int] = {}
        self._replay = RecordedEvents(rank.request.replay_events or [])
        self.averaged: GroupAverage | None = None
        """the average since the last step, if it was not due, until it is recorded"""
        self._rebalancer: Rebalancer | None = None
        self.growth: BatchGrowth | None = None
        """None unless the job allows an adaptive batch"""
        self._reports = False
        """whether the first rank tells the launcher how long the stages of pipelines take"""
        self._recent_s: list[float] = []
        self._recent_steps_s: list[float] = []

    def document(self) -> dict[str, Any]:
        """JSON for a checkpoint and for other ranks: the noise scale, and the growth if allowed."""
        growth = {"growth": self.growth.document()} if self.growth is not None else {}
        return {"noise": self._rank.noise_document(), **growth}

    def take_up(self, document: dict[str, Any]) -> None:
        """Restore the state from a `document`; an empty one starts from scratch."""
        spec = self._rank.spec
        self.growth = None
        if "growth" in document:
            self.growth = restored(document["growth"])
        elif spec.adaptive_batch:
            base = sum(self._rank.request.plan.shares)
            self.growth = BatchGrowth(
                base, base, rule_for(spec.learning_rate_rule, spec.optimizer.name)
            )
        if document:
            self._rank.load_noise(document["noise"])

    def rate_factor(self, step: int) -> float:
        """The factor on the learning rate due to the grown batch."""
        return (
            1.0 if self.growth is None else self.growth.factor(step, self._rank.noise_scale.value)
        )

    # -- when members change -----------------------------------------------------------------------

    def layout(self, state: CheckpointState, group: WorkerGroup) -> Layout:
        """The layout of a group: its own; in a replay, the recorded one; else the plan's."""
        request = self._rank.request
        if group.layout is not None:
            return group.layout
        if request.replay_events is None:
            return request.layout
        recorded = self._recorded_layout(state)
        return recorded if self._is_possible(recorded) else request.layout

    def _recorded_layout(self, state: CheckpointState) -> Layout:
        """The layout after the state's events."""
        events = [SplitEvent.model_validate(one) for one in state.events]
        return layout_since(events, self._rank.request.layout)

    def _is_possible(self, layout: Layout) -> bool:
        """Whether this plan has the devices of a layout, which an earlier plan may have had."""
        return set(layout.devices) <= {one.id for one in self._rank.request.plan.devices}

    def enter(self, state: CheckpointState, group: WorkerGroup) -> None:
        """Split the batch over the members of a new worker group. Raises TrainingFailed."""
        self._limits = group.limits
        stays = self._stays(state, group.members)
        self._rank.split = list(state.split)
        if _members_of(state) != group.members and self.growth is not None:
            self.growth.forget_times()
        if not stays:
            of_another_plan = state.members == []
            reason = f"another plan; {group.reason}" if of_another_plan else group.reason
            self._change(state, self._among(state, group.members), reason)
        elif (
            (group.generation > 1 and not group.end)
            or self._layout_changed(state) is not None
            or self.averaged is not None
        ):
            self._record(state, group.reason)
        state.members = group.members
        self._reset(group.members)

    def go_back(self, state: CheckpointState, members: list[int], reason: str) -> None:
        """Like `enter`, when the same members return to an earlier state. Raises TrainingFailed."""
        split = list(state.split) if self._stays(state, members) else self._among(state, members)
        self._rank.split, state.members = split, members
        self._reset(members)
        self._change(state, split, reason)

    def _stays(self, state: CheckpointState, members: list[int]) -> bool:
        """Whether the state's split fits these members and their limits, or a replay sets it."""
        if self._rank.request.replay_events is not None and len(members) == len(state.split):
            return True
        within = all(state.split[number] <= limit for number, limit in self._limits.items())
        sharing = [number for number in members if state.split[number]]
        layout = self._rank.layout
        moved = self._layout_changed(state) is not None
        staged = layout.has_stages and (moved or sharing != self._leaders(members))
        ended = not layout.has_stages and self._is_staged and sharing != members
        return _members_of(state) == members and within and not staged and not ended

    @property
    def _is_staged(self) -> bool:
        """Whether pipelines of several stages are planned or trained."""
        return self._rank.layout.has_stages or self._rank.request.layout.has_stages

    def _leaders(self, members: list[int]) -> list[int]:
        """The members whose share of the batch a pipeline takes."""
        weights = self._layout_weights()
        return [number for number in members if weights[number]]

    def _layout_weights(self) -> list[float]:
        """By device: its share of the batch in the current layout."""
        shares = self._rank.layout.shares
        return [float(shares.get(one.id, 0)) for one in self._rank.request.plan.devices]

    def _among(self, state: CheckpointState, members: list[int]) -> list[int]:
        """Split the state's global batch over these members.

        A grown batch shrinks, at most to its base, if the members' memory does not hold it.
        """
        total = sum(state.split)
        if self.growth is not None:
            total = max(
                self.growth.base,
                min(total, sum(self._limits.get(number, total) for number in members)),
            )
        if self._rank.layout.has_stages:
            split = split_among(total, self._leaders(members), self._layout_weights())
        elif self._is_staged:  # weights of stages say nothing about whole models
            split = split_among(total, members, self._layout_weights(), self._limits)
        else:
            split = split_among(total, members, self.weights, self._limits)
        if split is None:
            raise TrainingFailed(
                f"a global batch of {total} does not fit into the memory of the remaining ranks",
                final=True,
            )
        return split

    def _reset(self, members: list[int]) -> None:
        """Start to measure the speeds of these members; set the bound of the global batch."""
        rank, spec = self._rank, self._rank.spec
        split, limits = (
            [rank.split[number] for number in members],
            [self._most(number) for number in members],
        )
        adapts = spec.adaptive_split and rank.request.replay_events is None and len(members) > 1
        self._reports = adapts and rank.layout.has_stages and self.growth is None
        self._rebalancer = (
            Rebalancer(list(split), limits, self._pace(members))
            if adapts and min(split) > 0
            else None
        )
        if self.growth is not None:
            bound = min(spec.batch_bounds[1], len(rank.train_rows))
            self.growth.most = largest_batch(
                split, limits, bound, follows_speed=self._rebalancer is not None
            )
        self._recent_s, self._recent_steps_s = [], []

    def _pace(self, members: list[int]) -> list[float] | None:
        """By member: the planned time as a share of the slowest member's; None: all equal.

        A plan for energy or cost may leave a device idle for a part of each step.
        """
        plan = self._rank.request.plan
        if plan.objective == "time":
            return None
        times = [plan.devices[number].step_time_s.median for number in members]
        return [time / max(times) for time in times]

    def _most(self, number: int) -> int | None:
        """A device's largest batch, by the plan and by out-of-memory errors; None if unknown."""
        known = [self._rank.request.plan.devices[number].most_batch_size, self._limits.get(number)]
        return min((limit for limit in known if limit is not None), default=None)

    # -- between steps -----------------------------------------------------------------------------

    def note(self, own_s: float, step_time_s: float) -> None:
        """Record a step with a full batch: this rank's compute time and the step time."""
        self._recent_s.append(own_s)
        self._recent_steps_s.append(step_time_s)

    def obey_replay(self, state: CheckpointState, train_alone: TrainAlone | None = None) -> None:
        """Apply what the recorded run changed before the step that follows.

        `train_alone` does a number of this rank's updates in that step, of ranks that average.
        """
        for event in self._replay.left(state):
            self._obey(event, state, train_alone)

    def before_average(self, state: CheckpointState) -> None:
        """An average is due. In a replay, apply changes of the recorded run that came before it."""
        averaging = self._rank.averaging
        for event in self._replay.left(state):
            came_before = (
                averaging is not None
                and event.averaged is not None
                and not event.averaged.unfinished  # the step had begun: after all due averages
                and event.averaged.after == averaging.since_step
                and len(event.batch_sizes) == len(self.weights)
            )
            if not came_before:
                return
            self._obey(event, state, None)

    def _obey(
        self, event: SplitEvent, state: CheckpointState, train_alone: TrainAlone | None
    ) -> None:
        split, members = list(event.batch_sizes), state.members or []
        if event.averaged is not None and len(split) == len(self.weights):
            self._average_as(event.averaged, members, train_alone)
            self.averaged = event.averaged
        if event.layout is not None and self._is_possible(event.layout):
            self._rank.change_layout(event.layout, members)
        if len(split) != len(self.weights):  # recorded under an earlier plan
            split = shares(sum(split), self._rank.split)
        if any(size > 0 and number not in members for number, size in enumerate(split)):
            weights = [float(size) for size in split]
            split = split_among(sum(split), members, weights, self._limits) or self._rank.split
        self._change(state, split, event.reason)

    def _average_as(
        self, averaged: GroupAverage, members: list[int], train_alone: TrainAlone | None
    ) -> None:
        """Average as the recorded run did when its group changed: without what was lost."""
        rank = self._rank
        if rank.averaging is None:
            return
        updates = averaged.unfinished.get(rank.number, 0)
        if updates and train_alone is not None:
            train_alone(updates)
        by = [number for number in averaged.by if number in members] or members
        rank.average_with(members.index(by[0]), holds=rank.number in by)
        rank.averaging.begin()

    def rebalance(self, state: CheckpointState) -> None:
        """Every WINDOW_STEPS, compare the members' times; change split or batch if it pays."""
        rank, peers, members = self._rank, self._rank.collective, state.members or []
        grows = self.growth is not None and rank.request.replay_events is None
        if not (self._rebalancer or grows or self._reports) or state.step % WINDOW_STEPS != 0:
            return
        # One sum: each member's median, the first rank's step time, and all compute time.
        figures = torch.zeros(peers.size + 2, dtype=torch.float64)
        figures[peers.rank] = statistics.median(self._recent_s) if self._recent_s else 0.0
        figures[-2] = (
            mean_step_time_s(self._recent_steps_s) if self._recent_steps_s and rank.first else 0.0
        )
        figures[-1] = sum(self._recent_s)
        *medians_s, step_time_s, worked_s = peers.sum_(figures, "medians").tolist()
        whole = worked_s >= WINDOW_S * peers.size
        early = (
            grows
            and self.growth is not None
            and worked_s >= EARLY_WINDOW * (self.growth.worked_s + worked_s)
        )
        if not whole and not early:
            return
        if self.growth is not None:
            self.growth.worked_s += worked_s
        self._recent_s, self._recent_steps_s = [], []
        if self._reports and whole and rank.first:
            self._report(state, dict(zip(members, medians_s, strict=True)))
        better = (
            self._rebalancer.observe(medians_s) if self._rebalancer is not None and whole else None
        )
        if better is None and grows:
            better = self._grown(members, step_time_s)
        if better is not None:
            split, known = [0] * len(rank.split), sum(self.weights[number] for number in members)
            for number, size in zip(members, better[0], strict=True):
                split[number], self.weights[number] = size, known * size / sum(better[0])
            self._change(state, split, better[1])
            if rank.first:
                self._channel.send("weights", weights=self.weights)

    def _report(self, state: CheckpointState, compute_s: dict[int, float]) -> None:
        """Say how long stages take: the launcher plans their cuts."""
        rank = self._rank
        left = steps_left(state.samples, len(rank.train_rows), rank.spec.epochs, sum(rank.split))
        self._channel.send(
            "stage times",
            members=list(compute_s),
            compute_s=list(compute_s.values()),
            steps_left=left,
        )

    def _grown(self, members: list[int], step_time_s: float) -> tuple[list[int], str] | None:
        """The members' split of a better global batch and the reason, or None."""
        assert self.growth is not None
        found = self.growth.observe(step_time_s, self._rank.noise_scale.value)
        if found is None:
            return None
        batch, reason = found
        if self._rebalancer is not None:
            return self._rebalancer.resized(batch), reason
        return shares(batch, [self._rank.split[number] for number in members]), reason

    def average(self, state: CheckpointState, reason: str | None = None) -> None:
        """Average parameters and moments of all ranks, because a checkpoint or a group ends them.

        Recorded with a `reason`, otherwise when the next group forms.
        """
        averaging = self._rank.averaging
        if averaging is None:
            return
        after = averaging.since_step
        if self._rank.average(moments=True):
            self.averaged = GroupAverage(by=state.members or [], after=after)
            if reason is not None:
                self._record(state, reason)

    def _change(self, state: CheckpointState, split: list[int], reason: str) -> None:
        if self.growth is not None:
            self.growth.change(sum(split), state.step, self._rank.noise_scale.value)
        self._rank.split, state.split = list(split), list(split)
        self._recent_s, self._recent_steps_s = [], []
        self._record(state, reason)

    def _record(self, state: CheckpointState, reason: str) -> None:
        """Record the split from this step on and its reason.

        Also if the split itself stays: other processes may have taken over the same shares.
        """
        event = SplitEvent(
            step=state.step,
            batch_sizes=list(state.split),
            reason=reason,
            layout=self._layout_changed(state),
            averaged=self.averaged,
        )
        self.averaged = None
        last = SplitEvent.model_validate(state.events[-1]) if state.events else None
        if last is not None and event.layout is None and event.averaged is None:
            last = last.model_copy(update={"layout": None, "averaged": None})
        if event == last and event.averaged is None:  # the last group finished no step
            return
        state.events.append(document_of(event))
        if self._rank.first:
            name = {"layout": event.layout.name} if event.layout is not None else {}
            self._channel.send("split", **document_of(event) | name)

    def _layout_changed(self, state: CheckpointState) -> Layout | None:
        """The layout, if it is another than after the state's events."""
        layout = self._rank.layout
        return None if layout == self._recorded_layout(state) else layout


def _members_of(state: CheckpointState) -> list[int]:
    """The members for which the state's split was made."""
    return state.members if state.members is not None else list(range(len(state.split)))
