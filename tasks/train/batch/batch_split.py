"""The global batch and who takes how much of it: as planned, as the members change, as their speed does, or as a replay says."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import torch  # noqa: TID253 - only ranks import this

from trainwright.tasks.errors import TrainingFailed
from trainwright.tasks.runs.artefacts import SplitEvent
from trainwright.tasks.train.batch.adaptive_batch import (
    BatchGrowth,
    largest_batch,
    mean_step_time_s,
    restored,
    rule_for,
)
from trainwright.tasks.train.batch.rebalance import Rebalancer
from trainwright.tasks.train.batch.sampling import shares, split_among

if TYPE_CHECKING:
    from trainwright.tasks.train.channel import Channel
    from trainwright.tasks.train.checkpoint.files import State
    from trainwright.tasks.train.rank.rank import Rank
    from trainwright.tasks.train.worker_group import WorkerGroup

WINDOW_STEPS, WINDOW_S = 20, 1.5
"""at least, at the ranks' mean; shorter windows measure the machine's noise"""
EARLY_WINDOW = 0.1
"""of the time so far is enough for the batch to grow: a training that is soon over would else be so before the batch has grown"""


class BatchSplit:
    """What a rank knows of all ranks' batches. Every rank decides the same; each change is an event, noted with its reason."""

    def __init__(self, rank: Rank, channel: Channel) -> None:
        self._rank, self._channel = rank, channel
        self.weights = [float(planned.batch_size) for planned in rank.request.plan.devices]
        """in what proportion those who are there share the batch"""
        self._limits: dict[int, int] = {}
        self._replay = {event.step: event for event in rank.request.replay_events or []}
        self._rebalancer: Rebalancer | None = None
        self.growth: BatchGrowth | None = None
        """where the job lets the global batch grow"""
        self._recent_s: list[float] = []
        self._recent_steps_s: list[float] = []

    def document(self) -> dict[str, Any]:
        """The noise scale, and the batch's growth where the job lets it grow: for a checkpoint, and for other ranks."""
        growth = {"growth": self.growth.document()} if self.growth is not None else {}
        return {"noise": self._rank.noise_document(), **growth}

    def take_up(self, document: dict[str, Any]) -> None:
        """Go on from a `document`; anew where it is empty."""
        spec, planned = self._rank.spec, self._rank.request.plan.devices
        self.growth = None
        if "growth" in document:
            self.growth = restored(document["growth"])
        elif spec.adaptive_batch:
            base = sum(device.batch_size for device in planned)
            self.growth = BatchGrowth(
                base, base, rule_for(spec.learning_rate_rule, spec.optimizer.name)
            )
        if document:
            self._rank.load_noise(document["noise"])

    def rate_factor(self, step: int) -> float:
        """By how much the learning rate follows the grown batch."""
        return (
            1.0 if self.growth is None else self.growth.factor(step, self._rank.noise_scale.value)
        )

    # -- among whom --------------------------------------------------------------------------------------------------

    def enter(self, state: State, group: WorkerGroup) -> None:
        """The members' batches in this worker group, and what they can be from now on. Raises TrainingFailed."""
        self._limits = group.limits
        stays = self._stays(state, group.members)
        self._rank.split = list(state.split)
        if _members_of(state) != group.members and self.growth is not None:
            self.growth.forget_times()
        if not stays:
            of_another_plan = state.members == []
            reason = f"another plan; {group.reason}" if of_another_plan else group.reason
            self._change(state, self._among(state, group.members), reason)
        elif group.generation > 1 and not group.end:
            self._tell(state, group.reason)
        state.members = group.members
        self._weigh_anew(group.members)

    def go_back(self, state: State, members: list[int], reason: str) -> None:
        """As `enter`, where the same members return to an earlier state. Raises TrainingFailed."""
        split = list(state.split) if self._stays(state, members) else self._among(state, members)
        self._rank.split, state.members = split, members
        self._weigh_anew(members)
        self._change(state, split, reason)

    def _stays(self, state: State, members: list[int]) -> bool:
        """Whether the state's split is for these members, and within their limits; or a replay says what they take."""
        if self._rank.request.replay_events is not None and len(members) == len(state.split):
            return True
        within = all(state.split[number] <= limit for number, limit in self._limits.items())
        return _members_of(state) == members and within

    def _among(self, state: State, members: list[int]) -> list[int]:
        """The state's global batch among these members; less of it where it had grown and their memory does not hold it."""
        total = sum(state.split)
        if self.growth is not None:
            total = max(
                self.growth.base,
                min(total, sum(self._limits.get(number, total) for number in members)),
            )
        split = split_among(total, members, self.weights, self._limits)
        if split is None:
            raise TrainingFailed("the members' memory does not hold the global batch", final=True)
        return split

    def _weigh_anew(self, members: list[int]) -> None:
        rank, spec = self._rank, self._rank.spec
        split, limits = (
            [rank.split[number] for number in members],
            [self._most(number) for number in members],
        )
        adapts = spec.adaptive_split and rank.request.replay_events is None and len(members) > 1
        self._rebalancer = Rebalancer(list(split), limits) if adapts and min(split) > 0 else None
        if self.growth is not None:
            bound = min(spec.batch_bounds[1], len(rank.train_rows))
            self.growth.most = largest_batch(
                split, limits, bound, follows_speed=self._rebalancer is not None
            )
        self._recent_s, self._recent_steps_s = [], []

    def _most(self, number: int) -> int | None:
        """The largest batch of a device, as planned and as it was seen; None: not known."""
        known = [self._rank.request.plan.devices[number].most_batch_size, self._limits.get(number)]
        return min((limit for limit in known if limit is not None), default=None)

    # -- between steps -----------------------------------------------------------------------------------------------

    def note(self, own_s: float, step_time_s: float) -> None:
        """What a step with the whole batch took this rank, and all."""
        self._recent_s.append(own_s)
        self._recent_steps_s.append(step_time_s)

    def obey_replay(self, state: State) -> None:
        """The split that was taken at this step when the training ran first."""
        event = self._replay.get(state.step)
        if event is None or event.model_dump() in state.events:
            return
        split, members = list(event.batch_sizes), state.members or []
        if len(split) != len(self.weights):  # of an earlier plan's devices
            split = shares(sum(split), self._rank.split)
        if any(size > 0 and number not in members for number, size in enumerate(split)):
            weights = [float(size) for size in split]
            split = split_among(sum(split), members, weights, self._limits) or self._rank.split
        self._change(state, split, event.reason)

    def rebalance(self, state: State) -> None:
        """Every so often, compare the members' own times and weigh a larger batch; change the split where it pays."""
        rank, peers, members = self._rank, self._rank.collective, state.members or []
        grows = self.growth is not None and rank.request.replay_events is None
        if not (self._rebalancer or grows) or state.step % WINDOW_STEPS != 0:
            return
        figures = torch.zeros(peers.size + 2, dtype=torch.float64)
        figures[peers.rank] = statistics.median(self._recent_s) if self._recent_s else 0.0
        figures[-2] = (
            mean_step_time_s(self._recent_steps_s) if self._recent_steps_s and rank.first else 0.0
        )
        figures[-1] = sum(self._recent_s)
        *medians_s, step_time_s, worked_s = peers.sum_(figures, "medians").tolist()
        whole = worked_s >= WINDOW_S * peers.size  # by all ranks together
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

    def _grown(self, members: list[int], step_time_s: float) -> tuple[list[int], str] | None:
        """The members' split of a better global batch, and the reason."""
        assert self.growth is not None
        found = self.growth.observe(step_time_s, self._rank.noise_scale.value)
        if found is None:
            return None
        batch, reason = found
        if self._rebalancer is not None:
            return self._rebalancer.resized(batch), reason
        return shares(batch, [self._rank.split[number] for number in members]), reason

    def _change(self, state: State, split: list[int], reason: str) -> None:
        if self.growth is not None:
            self.growth.change(sum(split), state.step, self._rank.noise_scale.value)
        self._rank.split, state.split = list(split), list(split)
        self._recent_s, self._recent_steps_s = [], []
        self._tell(state, reason)

    def _tell(self, state: State, reason: str) -> None:
        """Why the split is what it is from this step on, also where it stays: other processes may take the same shares."""
        event = SplitEvent(
            step=state.step, batch_sizes=list(state.split), reason=reason
        ).model_dump()
        if state.events and state.events[-1] == event:  # groups that finished no step
            return
        state.events.append(event)
        if self._rank.first:
            self._channel.send("split", **event)


def _members_of(state: State) -> list[int]:
    """The members that the state's split is for."""
    return state.members if state.members is not None else list(range(len(state.split)))
