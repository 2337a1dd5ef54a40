"""Layouts that average parameters: which layers, how often, in which local steps.

**Interval.** With t the time of a step without an average, c that of an average, and a(k) the
averages in a step for the interval k, it is the shortest k of a list for which

    a(k) · c ≤ MOST_SHARE · t        and        a(k) ≤ MOST_SHARE

An average sends as much as a sum of gradients. Averages also happen at the end of each epoch, to
evaluate, and at each checkpoint; a(k) counts those. That a checkpoint averages the optimizer's
moments too does not depend on k: only the predicted bytes count it. The interval is at most
MOST_INTERVAL, that of A. Douillard et al. (DiLoCo, arXiv:2311.08105). If no interval keeps both
bounds, it is the one that comes closest.

**Local steps.** Devices of unlike speeds do local steps of equal batches, so that the number of
steps, not the noise of each, follows the speed. The local batch is the smallest device's share,
doubled until a step takes at most MOST_SLOWER longer than with one local step for each device.

**Mixed.** The layers with the most parameters are averaged, as few as it takes: more of them would
make a step less than LEAST_GAIN shorter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from trainwright.estimator.structure import LayerFacts
from trainwright.tasks.allocate.layouts.choose import LayoutChoice, SimulatedLayout, micro_batches
from trainwright.tasks.allocate.layouts.memory import MOMENTS
from trainwright.tasks.allocate.plan.configuration import Configuration
from trainwright.tasks.errors import BadInput
from trainwright.tasks.runs.artefacts.layout import Layout, Pipeline, Sync
from trainwright.tasks.spec.train_spec import LayoutSpec, TrainSpec

MOST_SHARE = 0.05
MOST_INTERVAL = 500
MOST_SLOWER = 0.05
LEAST_GAIN = 0.05
LEAST_LOCAL_BATCH = 8
_INTERVALS = (20, 25, 32, 40, 50, 64, 80, 100, 125, 160, 200, 250, 320, 400, 500)
_MOST_PLAYED = 10_000
_EACH = 16
"""Up to this number of averaged layers, each number is tried."""


@dataclass(frozen=True)
class AverageTimes:
    """When a training averages apart from the interval: after which steps."""

    epoch_steps: int
    checkpoint_steps: int
    steps: int
    moments: int
    """tensors that a checkpoint averages for each parameter"""
    keeps_best: bool = False
    """whether each epoch may write a checkpoint: the best so far"""

    @staticmethod
    def of(spec: TrainSpec, rows: int, batch: int) -> AverageTimes:
        """Those of a job with this many training rows and this global batch."""
        epoch, policy = -(-rows // batch), spec.checkpoint
        moments = MOMENTS[spec.optimizer.name]
        steps = epoch * spec.epochs
        return AverageTimes(epoch, policy.every_steps, steps, moments, policy.keep_best)

    def in_a_step(self, every: int) -> tuple[float, float]:
        """Averages in a step, and what they send, as a multiple of what one average sends."""
        played = min(self.steps, _MOST_PLAYED)
        averages, moments, since = 0, 0, 0
        for step in range(1, played + 1):
            since += 1
            ends = step % self.epoch_steps == 0
            saves = step % self.checkpoint_steps == 0 or step == self.steps
            saves |= ends and self.keeps_best
            if since == every or ends or saves:
                averages += 1
                since = 0
            moments += self.moments if saves else 0
        return averages / played, (averages + moments) / played

    def in_a_step_of(self, layout: Layout) -> tuple[float, float]:
        """The same for a layout with its interval."""
        averages, sent = self.in_a_step(layout.average_every or 1)
        # Without divergence, gradients are summed instead, and moments are equal.
        return averages, sent if layout.averages else averages

    def in_words(self, every: int) -> str:
        """How often parameters are averaged: after the interval, or earlier for another reason."""
        first = min(every, self.epoch_steps, self.checkpoint_steps)
        often = f"every {first} steps" if first > 1 else "after each step"
        if first == every:
            return often
        at = "the end of each epoch" if first == self.epoch_steps else "each checkpoint"
        return f"{often} (at {at}, before the {every} of average_every)"


def interval(times: AverageTimes, step_s: float, average_s: float) -> int:
    """The steps between averages, by the module's rule."""
    found, closest = 0, 0.0
    useful = [one for one in _INTERVALS if one < times.epoch_steps] or [1]
    last = min(times.epoch_steps, MOST_INTERVAL)
    for every in (*useful, last) if last > useful[-1] else useful:
        averages, _ = times.in_a_step(every)
        beyond = averages * max(average_s / max(1e-12, step_s), 1) / MOST_SHARE
        if not found or beyond < closest * (1 - 1e-9):
            found, closest = every, beyond
        if beyond <= 1:
            break
    return max(1, found)


def averaged(result: Configuration, choice: LayoutChoice, spec: LayoutSpec) -> SimulatedLayout:
    """The layout with averages that the job asks for, its step amortised over the interval.

    Raises BadInput if the model has no two layers to treat apart, for `mixed`.
    """
    model = result.topology.model
    train = model.job.train
    times = AverageTimes.of(train, model.data.train_rows, result.batch)
    planned = _Averaged(choice, times, spec)
    if train.averages == "averaging":
        return planned.amortised(planned.alone(result))
    return planned.mixed()


class _Averaged:
    """Layouts with averages on the devices of a choice."""

    def __init__(self, choice: LayoutChoice, times: AverageTimes, spec: LayoutSpec) -> None:
        self._choice, self._times, self._spec = choice, times, spec

    def amortised(self, layout: Layout) -> SimulatedLayout:
        """The layout with its interval; its step, with the part of an average that falls on it."""
        between, whole = (self._choice.simulated(layout, averages=one) for one in (False, True))
        average_s = whole.step_s - between.step_s
        every = self._spec.average_every or interval(self._times, between.step_s, average_s)
        layout = layout.model_copy(update={"average_every": every})
        averages, sent = self._times.in_a_step_of(layout)
        step = replace(
            whole,
            step_s=between.step_s + averages * average_s,
            sent_bytes=[
                one + sent * (with_average - one)
                for one, with_average in zip(between.sent_bytes, whole.sent_bytes, strict=True)
            ],
        )
        return SimulatedLayout(layout, step, self._choice.shortage(layout))

    def alone(self, result: Configuration) -> Layout:
        """The layout in which every device trains alone, with its local steps."""
        batches = [batch for _, batch in result.devices()]
        if (given := self._spec.local_batch) is not None:
            return self._with_local(batches, given)
        # Each micro-batch of a share that does not fit in memory is a local step.
        most = -(-max(batches) // result.accumulation)
        whole = self._with_local(batches, None if most == max(batches) else most)
        bound = self._between_s(whole) * (1 + MOST_SLOWER)
        for size in _doubled(max(LEAST_LOCAL_BATCH, min(one for one in batches if one)), most):
            divided = self._with_local(batches, size)
            if self._between_s(divided) <= bound:
                return divided
        return whole

    def _between_s(self, layout: Layout) -> float:
        return self._choice.simulated(layout, averages=False).step_s

    def _with_local(self, batches: Sequence[int], size: int | None) -> Layout:
        plain = self._choice.layout({})
        parts = [max(1, round(batch / size)) if size else 1 for batch in batches]
        pipelines = [
            Pipeline(micro_batches=micro_batches(batch, count), stages=one.stages)
            for one, batch, count in zip(plain.pipelines, batches, parts, strict=True)
        ]
        return plain.model_copy(
            update={
                "name": "averaging",
                "pipelines": pipelines,
                "average_every": self._spec.average_every or MOST_INTERVAL,
                "local_batch": size,
                "outer": self._spec.outer,
            }
        )

    def mixed(self) -> SimulatedLayout:
        """The layout in which the largest layers are averaged, and the others not."""
        trained = sorted(
            [one for one in self._choice.layers if one.parameters and not one.shared],
            key=lambda one: -one.parameter_bytes,
        )
        rest = [one for one in self._choice.layers if one.parameters and one.shared]
        most = len(trained) - (0 if rest else 1)
        if most < 1:
            raise BadInput(
                "train.layout: got 'mixed'; the model has no two layers with parameters of their "
                "own, of which one can be averaged"
            )
        counts = [one for one in range(1, most + 1) if one <= _EACH or one % _EACH == 0]
        found = [self._of_largest(trained[:count]) for count in counts]
        best_s = min(one.step.step_s for one in found)
        return next(one for one in found if one.step.step_s * (1 - LEAST_GAIN) <= best_s)

    def _of_largest(self, layers: Sequence[LayerFacts]) -> SimulatedLayout:
        syncs: dict[str, Sync] = {**self._others(), **{one.name: "average" for one in layers}}
        layout = self._choice.layout(syncs)
        return self.amortised(
            layout.model_copy(
                update={
                    "average_every": self._spec.average_every or MOST_INTERVAL,
                    "outer": self._spec.outer,
                }
            )
        )

    def _others(self) -> dict[str, Sync]:
        """How layers that are not averaged are kept equal."""
        if self._spec.dense == "auto":
            return dict(self._choice.best().layout.sync) if self._choice.is_compared else {}
        found = self._choice.everywhere(self._spec.dense)
        return dict(found.layout.sync) if found is not None else {}


def _doubled(size: int, most: int) -> Iterator[int]:
    while size < most:
        yield size
        size *= 2
