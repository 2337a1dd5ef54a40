"""The layout of a plan: the best one on the devices that the planner found, and why others lost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from trainwright.tasks.allocate.layouts.averages import AverageTimes, averaged
from trainwright.tasks.allocate.layouts.choose import LayoutChoice, SimulatedLayout
from trainwright.tasks.allocate.layouts.layer_groups import layer_groups
from trainwright.tasks.allocate.layouts.memory import Shortage
from trainwright.tasks.allocate.layouts.permitted import why_not
from trainwright.tasks.allocate.layouts.words import in_words
from trainwright.tasks.allocate.plan.confidence import Triple
from trainwright.tasks.allocate.plan.configuration import Configuration, Goal, Limits
from trainwright.tasks.allocate.plan.cost import CollectiveTime
from trainwright.tasks.errors import BadInput
from trainwright.tasks.runs.artefacts.layout import CHUNK_BYTES, DATA_PARALLEL, Sync
from trainwright.tasks.runs.artefacts.plan import LayerGroup
from trainwright.tasks.spec.train_spec import LayoutSpec
from trainwright.tasks.units import counted

_NO_COLLECTIVES = CollectiveTime(Triple(0.0, 0.0, 0.0), Triple(0.0, 0.0, 0.0))
_EVERYWHERE: dict[str, Sync] = {"late-multiply": "factors", "sharded": "rows"}


@dataclass(frozen=True)
class LayoutCandidate:
    """A layout with its configuration, and whether the devices' memory holds it."""

    configuration: Configuration
    words: str = ""
    """the layout in words"""
    shortage: Shortage | None = None
    """None: it fits"""

    def misses(self, limits: Limits) -> tuple[float, float]:
        """By how much it exceeds memory (bytes) and the limits (relative); zeros: it is usable."""
        over = 0.0 if self.shortage is None else self.shortage.over_bytes
        return over, self.configuration.excess(limits)


@dataclass(frozen=True)
class LaidOut:
    """The chosen layout on some devices, and the others that were compared."""

    chosen: LayoutCandidate
    others: list[LayoutCandidate] = field(default_factory=list)
    rule: str | None = None
    """why it was chosen"""
    by_layer: list[LayerGroup] = field(default_factory=list)
    """why each layer has its sync, if layouts were compared"""
    needs: Mapping[str, float] = field(default_factory=dict)
    """peak memory of each device in bytes, by id; empty: that of data parallel"""
    compute_s: Mapping[str, float] = field(default_factory=dict)
    """seconds of a step that each device computes, by id; empty: those for its share"""


def laid_out(
    result: Configuration, wanted: LayoutSpec | str, goal: Goal, limits: Limits
) -> LaidOut:
    """A configuration's devices with the best layout that the job permits.

    Data parallel is compared with others only if `LayoutChoice.is_compared`: on one machine,
    messages cost more than the prediction knows, and many devices would take too long. If no layout
    fits into memory and within the limits, it is the one that comes closest.
    Raises BadInput if the job wants a layout that the model or the devices do not permit.
    """
    spec = wanted if isinstance(wanted, LayoutSpec) else LayoutSpec()
    averages = result.topology.model.job.train.averages
    fixed = spec.dense != "auto" or averages is not None
    given = fixed if isinstance(wanted, LayoutSpec) else wanted != "auto"
    choice = LayoutChoice(result, spec.chunk_bytes or CHUNK_BYTES, spec.factor_type)
    plain_is_given = averages is None and (wanted == DATA_PARALLEL or spec.dense == "sum")
    if not choice.possible:
        if given and not plain_is_given:
            _refuse_alone(result, wanted)
        return LaidOut(LayoutCandidate(result))
    base = choice.with_syncs({})
    if (plain_is_given or not given) and base.shortage is None and not choice.is_compared:
        words = in_words(base.layout, choice.layers, 0.0, 0.0)
        rule = _GIVEN if given else choice.why_not_compared
        return LaidOut(LayoutCandidate(replace(result, layout=base.layout), words), rule=rule)
    compared = choice.candidates() if averages is None or choice.is_compared else [base]
    everything = [_candidate(choice, result, one) for one in compared]
    if given:
        asked = (
            _wanted(choice, wanted, spec) if averages is None else averaged(result, choice, spec)
        )
        chosen, rule = _candidate(choice, result, asked), _GIVEN
        if averages is not None and not choice.is_compared:
            rule += f"; compared with data parallel only: {choice.why_not_compared}"
    else:
        chosen, rule = _least(everything, goal, limits)
        rule += _not_permitted(choice)
    layout = chosen.configuration.layout
    assert layout is not None
    if given and isinstance(wanted, str) and layout.name != wanted:
        rule = f"{wanted}, {_GIVEN}, of the layers that permit it, so the whole is {layout.name}"
    others = [one for one in everything if one.configuration.layout != layout]
    groups = layer_groups(layout, choice.layers, _times(result), given=given)
    if spec.chunk_bytes is None and not layout.averages:
        best = _configured(result, base, choice.with_best_chunks(layout))
        chosen = replace(chosen, configuration=best)
    return LaidOut(chosen, others, rule, groups, choice.needs(layout))


_GIVEN = "as train.layout says"


def _least(
    everything: Sequence[LayoutCandidate], goal: Goal, limits: Limits
) -> tuple[LayoutCandidate, str]:
    """The best candidate and why; data parallel unless another is clearly better or it can't be."""
    plain, count = everything[0], len(everything)
    chosen = min(everything, key=lambda one: (*one.misses(limits), one.configuration.value(goal)))
    best = f"the best of {counted(count, 'layout')} by prediction"
    if plain.misses(limits) > chosen.misses(limits):
        short = plain.shortage is not None
        why = "needs too much memory" if short else "is too slow"
        return chosen, f"{best}; data parallel {why}"
    least = plain.configuration.value(goal) * (1 - LEAST_GAIN)
    if chosen.configuration.value(goal) < least:
        return chosen, best
    if count == 1:
        return plain, "the only layout that the model permits"
    return plain, f"none of the {count - 1} others is better by more than {100 * LEAST_GAIN:.0f} %"


def _not_permitted(choice: LayoutChoice) -> str:
    """The layouts that no layer permits, with reasons."""
    refused: dict[str, list[str]] = {}
    for name, sync in _EVERYWHERE.items():
        if choice.everywhere(sync) is None:
            refused.setdefault(_reasons(choice, sync), []).append(name)
    return "".join(
        f"; no layer permits {' or '.join(names)}: {reasons}" for reasons, names in refused.items()
    )


def _words(choice: LayoutChoice, result: Configuration, one: SimulatedLayout) -> str:
    sent, summed = (max(each.step.sent_bytes) for each in (one, choice.with_syncs({})))
    every = one.layout.average_every
    averages = _times(result).in_words(every) if every is not None else ""
    return in_words(one.layout, choice.layers, sent, summed, averages)


def _times(result: Configuration) -> AverageTimes:
    model = result.topology.model
    return AverageTimes.of(model.job.train, model.data.train_rows, result.batch)


LEAST_GAIN = 0.05
"""A layout other than data parallel must be better by this share: predictions are not exact."""


def _wanted(choice: LayoutChoice, wanted: LayoutSpec | str, spec: LayoutSpec) -> SimulatedLayout:
    """The candidate that the job asks for."""
    if wanted == DATA_PARALLEL or spec.dense == "sum":
        return choice.with_syncs({})
    if wanted == "hybrid":
        best = choice.best()
        if best.layout.name != "hybrid":
            mixed = choice.mixed()
            if mixed is None:
                raise BadInput(
                    "train.layout: got 'hybrid'; the model has no two kinds of layers to treat "
                    f"apart: {_reasons(choice, 'factors')}"
                )
            return mixed
        return best
    sync = _EVERYWHERE.get(str(wanted)) or (spec.dense if spec.dense != "auto" else None)
    if sync is None:
        return choice.best()
    found = choice.everywhere(sync)
    if found is None:
        raise BadInput(f"{_asked(wanted)}; no layer permits it: {_reasons(choice, sync)}")
    return found


def _reasons(choice: LayoutChoice, sync: Sync) -> str:
    trained = [one for one in choice.layers if one.parameters]
    reasons = [f"{one.name}: {reason}" for one in trained if (reason := why_not(one, sync))]
    return "; ".join(reasons[:3]) + ("; …" if len(reasons) > 3 else "")


def _asked(wanted: LayoutSpec | str) -> str:
    """The field that asks for a layout, with its value."""
    if isinstance(wanted, LayoutSpec):
        averages = wanted.averages
        return (
            f"train.layout.dense: got {wanted.dense!r}"
            if averages is None
            else f"train.layout.name: got {averages!r}"
        )
    return f"train.layout: got {wanted!r}"


def _refuse_alone(result: Configuration, wanted: LayoutSpec | str) -> None:
    known = bool(result.topology.model.estimate.layers)
    why = (
        "the plan has one device; set devices.min_count to 2 or more for several"
        if known
        else "the estimate does not say what each layer costs; estimate again"
    )
    raise BadInput(f"{_asked(wanted)}; {why}")


def _candidate(
    choice: LayoutChoice, result: Configuration, one: SimulatedLayout
) -> LayoutCandidate:
    configured = _configured(result, choice.with_syncs({}), one)
    return LayoutCandidate(configured, _words(choice, result, one), one.shortage)


def _configured(
    result: Configuration, base: SimulatedLayout, one: SimulatedLayout
) -> Configuration:
    """The configuration with a layout and its simulated step; intervals keep their proportions.

    `base` is data parallel's. A step is not shorter than its computing, nor than its sums.
    """
    model = result.topology.model
    loop_s = max(_loops_s(result))
    ratio = max(one.step.step_s + loop_s, _least_s(result, one)) / result.cost.step_s.median
    kinds = [model.kind(device) for device, _ in result.devices()]
    work_j = sum(
        kind.extra_w * (after - before)
        for kind, before, after in zip(
            kinds, base.step.computed_s, one.step.computed_s, strict=True
        )
        if math.isfinite(kind.extra_w)
    )
    ranks = [(share.kind, share.ranks) for share in result.shares]
    waiting = model.ranks_cost(ranks, _NO_COLLECTIVES, result.batch, result.accumulation)
    step_s = Triple(*(ratio * value for value in result.cost.step_s))
    cost = result.cost.with_steps(model.steps(result.batch), step_s, waiting, work_j)
    return replace(result, cost=cost, strategy=one.layout.name, layout=one.layout)


def _least_s(result: Configuration, one: SimulatedLayout) -> float:
    """Seconds that no step is below: computing and the last sum, or all sums, by `plan.cost`."""
    topology, layers = result.topology, result.topology.model.estimate.layers
    slowest_s = max(map(sum, zip(one.step.computed_s, _loops_s(result), strict=True)))
    whole = sum(layer.parameter_bytes for layer in layers)
    summed = sum(layer.parameter_bytes for layer in layers if one.layout.how(layer.name) == "sum")
    sent = topology.model.estimate.gradient_bytes * (summed / whole if whole else 1.0)
    times, ring = topology.collectives.time, result.placement.ring
    last_s = times(ring, min(1.0, sent)).tail.median
    return max(slowest_s + last_s, times(ring, sent).total.median)


def _loops_s(result: Configuration) -> list[float]:
    """What the training loop adds to a step on each device, in seconds."""
    kind = result.topology.model.kind
    return [
        kind(device).curve.loop_part_s(batch, result.accumulation) or 0.0
        for device, batch in result.devices()
    ]
