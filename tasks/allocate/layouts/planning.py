"""The layout of a plan: the best one on the devices that the planner found, and why others lost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainwright.tasks.allocate.layouts.actions import COMPUTE
from trainwright.tasks.allocate.layouts.choose import LayoutChoice, SimulatedLayout
from trainwright.tasks.allocate.layouts.permitted import why_not
from trainwright.tasks.allocate.layouts.words import in_words
from trainwright.tasks.allocate.plan.confidence import Triple
from trainwright.tasks.allocate.plan.configuration import Configuration, Goal
from trainwright.tasks.allocate.plan.cost import CollectiveTime
from trainwright.tasks.errors import BadInput
from trainwright.tasks.runs.artefacts.layout import CHUNK_BYTES, DATA_PARALLEL, LayoutName, Sync
from trainwright.tasks.spec.train_spec import LayoutSpec

_NO_COLLECTIVES = CollectiveTime(Triple(0.0, 0.0, 0.0), Triple(0.0, 0.0, 0.0))
_EVERYWHERE: dict[str, Sync] = {"late-multiply": "factors", "sharded": "rows"}


@dataclass(frozen=True)
class LaidOut:
    """A configuration with its layout, and the best configuration of each other layout."""

    chosen: Configuration
    others: dict[LayoutName, Configuration]
    words: str = ""
    """the chosen layout in words"""


def laid_out(result: Configuration, wanted: LayoutSpec | str, goal: Goal) -> LaidOut:
    """The configuration with the best layout that the job permits.

    Data parallel is compared with others only if `LayoutChoice.is_compared`: on one machine,
    messages cost more than the prediction knows, and many devices would take too long.
    Raises BadInput if the job wants a layout that the model or the devices do not permit.
    """
    spec = wanted if isinstance(wanted, LayoutSpec) else LayoutSpec()
    choice = LayoutChoice(result, spec.chunk_bytes or CHUNK_BYTES, spec.factor_type)
    if not choice.possible:
        if wanted not in ("auto", DATA_PARALLEL) and not isinstance(wanted, LayoutSpec):
            _refuse_alone(result, str(wanted))
        return LaidOut(result, {})
    if wanted in ("auto", DATA_PARALLEL) and not choice.is_compared:
        plain_layout = choice.layout({})
        words = in_words(plain_layout, choice.layers, 0.0, 0.0)
        return LaidOut(replace(result, layout=plain_layout), {}, words)
    base = choice.with_syncs({})
    everything = {
        name: _configured(result, base, candidate) for name, candidate in choice.named().items()
    }
    if wanted == "auto":
        chosen = min(everything.values(), key=lambda one: one.value(goal))
        plain = everything[DATA_PARALLEL]
        if chosen.value(goal) >= plain.value(goal) * (1 - _LEAST_GAIN):
            chosen = plain
    else:
        chosen = _configured(result, base, _wanted(choice, wanted, spec))
    layout = chosen.layout
    assert layout is not None
    sent = max(choice.with_syncs(layout.sync).step.sent_bytes)
    words = in_words(layout, choice.layers, sent, max(base.step.sent_bytes))
    others = {key: one for key, one in everything.items() if key != layout.name}
    return LaidOut(chosen, others, words)


_LEAST_GAIN = 0.1
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
        field = "train.layout" if not isinstance(wanted, LayoutSpec) else "train.layout.dense"
        given = wanted if not isinstance(wanted, LayoutSpec) else spec.dense
        raise BadInput(f"{field}: got {given!r}; no layer permits it: {_reasons(choice, sync)}")
    return found


def _reasons(choice: LayoutChoice, sync: Sync) -> str:
    trained = [one for one in choice.layers if one.parameters]
    reasons = [f"{one.name}: {reason}" for one in trained if (reason := why_not(one, sync))]
    return "; ".join(reasons[:3]) + ("; …" if len(reasons) > 3 else "")


def _refuse_alone(result: Configuration, wanted: str) -> None:
    known = bool(result.topology.model.estimate.layers)
    why = (
        "the plan has one device"
        if known
        else "the estimate does not say what each layer costs; estimate again"
    )
    raise BadInput(f"train.layout: got {wanted!r}; {why}")


def _configured(
    result: Configuration, base: SimulatedLayout, one: SimulatedLayout
) -> Configuration:
    """The configuration with a layout, its cost in proportion to data parallel's simulated step."""
    model = result.topology.model
    ratio = one.step.step_s / base.step.step_s if base.step.step_s > 0 else 1.0
    kinds = [model.kind(device) for device, _ in result.devices()]
    work_j = sum(
        kind.extra_w * (after - before)
        for kind, before, after in zip(kinds, _compute(base), _compute(one), strict=True)
        if math.isfinite(kind.extra_w)
    )
    ranks = [(share.kind, share.ranks) for share in result.shares]
    waiting = model.ranks_cost(ranks, _NO_COLLECTIVES, result.batch, result.accumulation)
    step_s = Triple(*(ratio * value for value in result.cost.step_s))
    cost = (
        result.cost
        if one.layout.name == DATA_PARALLEL
        else result.cost.with_steps(model.steps(result.batch), step_s, waiting, work_j)
    )
    return replace(result, cost=cost, strategy=one.layout.name, layout=one.layout)


def _compute(one: SimulatedLayout) -> Sequence[float]:
    """Seconds that each rank computes."""
    total: Any = sum(
        end - begin for action, begin, end in one.step.events if action.kind in COMPUTE
    )
    found: list[float] = total.tolist()
    return found
