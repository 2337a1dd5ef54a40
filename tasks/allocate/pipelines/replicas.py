"""Several pipelines: their devices and cuts, and the share of the batch of each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainwright.tasks.allocate.plan.split import shares
from trainwright.tasks.allocate.recompute.stage_recompute import RecomputedStage
from trainwright.tasks.runs.artefacts.layout import StageSchedule
from trainwright.tasks.spec.pool import Device


@dataclass(frozen=True)
class DividedPipeline:
    """One pipeline: its devices, in the order of its stages, its cuts and its micro-batches."""

    devices: tuple[Device, ...]
    cuts: tuple[int, ...]
    micro_batches: tuple[int, ...]
    recomputed: tuple[RecomputedStage | None, ...] = ()
    """of each stage; empty: nothing"""

    @property
    def again(self) -> tuple[RecomputedStage | None, ...]:
        """What each stage recomputes."""
        return self.recomputed or (None,) * len(self.devices)


@dataclass(frozen=True)
class PipelineDivision:
    """All pipelines of a layout, and the step of the slowest one."""

    pipelines: tuple[DividedPipeline, ...]
    schedule: StageSchedule
    step_s: float

    @property
    def has_stages(self) -> bool:
        """Whether some pipeline has several stages."""
        return any(len(one.devices) > 1 for one in self.pipelines)

    @property
    def key(self) -> object:
        """Equal for equal divisions."""
        return self.schedule, tuple(
            (tuple(device.id for device in one.devices), one.cuts, one.micro_batches)
            for one in self.pipelines
        )

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return sum(sum(one.micro_batches) for one in self.pipelines)

    @property
    def count(self) -> int:
        """Number of devices."""
        return sum(len(one.devices) for one in self.pipelines)


def groupings(
    alike: Sequence[int], speeds: Sequence[float], machines: Sequence[str], replicas: int
) -> list[list[list[int]]]:
    """Ways to divide devices into groups for so many pipelines, each once.

    One deals them by speed, so that groups are about as fast; one keeps machines together. `alike`
    numbers the kinds of the devices.
    """
    count = len(alike)
    if replicas == 1:
        return [[list(range(count))]]
    by_speed = sorted(range(count), key=lambda one: (-speeds[one], alike[one], one))
    dealt: list[list[int]] = [[] for _ in range(replicas)]
    sums = [0.0] * replicas
    for one in by_speed:
        least = min(range(replicas), key=lambda group: (len(dealt[group]), sums[group]))
        dealt[least].append(one)
        sums[least] += speeds[one]
    ordered = sorted(range(count), key=lambda one: (machines[one], alike[one], one))
    ends = [count * number // replicas for number in range(replicas + 1)]
    together = [ordered[begin:end] for begin, end in itertools.pairwise(ends)]
    found = [[sorted(own) for own in groups] for groups in (dealt, together)]
    return found if sorted(found[0]) != sorted(found[1]) else found[:1]


def exchanges(groups: Sequence[Sequence[int]], alike: Sequence[int]) -> Iterator[list[list[int]]]:
    """Groups with two unlike devices exchanged, or one moved to another group."""
    for one, other in itertools.combinations(range(len(groups)), 2):
        for mine, theirs in itertools.product(groups[one], groups[other]):
            if alike[mine] != alike[theirs]:
                changed = [list(group) for group in groups]
                changed[one][changed[one].index(mine)] = theirs
                changed[other][changed[other].index(theirs)] = mine
                yield [sorted(group) for group in changed]
    for one, other in itertools.permutations(range(len(groups)), 2):
        for mine in groups[one] if len(groups[one]) > 1 else ():
            changed = [list(group) for group in groups]
            changed[one].remove(mine)
            changed[other].append(mine)
            yield [sorted(group) for group in changed]


def batch_shares(batch: int, samples_per_s: Sequence[float], parts: int) -> list[int]:
    """Samples of each pipeline, in proportion to its speed; at least one for each micro-batch."""
    most = max(samples_per_s)
    spare = batch - parts * len(samples_per_s)
    if spare <= 0:
        return [batch // len(samples_per_s)] * len(samples_per_s)
    wanted = shares(batch, [round(1e6 * one / most) for one in samples_per_s])
    if min(wanted) >= parts:
        return wanted
    more = shares(spare, [round(1e6 * one / most) for one in samples_per_s])
    return [parts + one for one in more]
