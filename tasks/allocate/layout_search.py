"""Chooses devices and layout together.

The exact search (`search`) knows data parallel only. A search of the relaxed problem finds devices
that suit other layouts; the layouts are simulated on both. The least value of a third problem
(`layout_bound`) bounds what any plan could gain.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from trainwright.tasks.allocate.batch_choice import choose_batch, preferred
from trainwright.tasks.allocate.infeasible.binding_limits import (
    fastest_of_all,
    infeasible,
    rounded_up,
)
from trainwright.tasks.allocate.infeasible.binding_link import enough_bandwidth
from trainwright.tasks.allocate.infeasible.binding_memory import too_little_memory
from trainwright.tasks.allocate.layouts.choose import MOST_COMPARED
from trainwright.tasks.allocate.layouts.layout_bound import bounding
from trainwright.tasks.allocate.layouts.planning import (
    LEAST_GAIN,
    LaidOut,
    LayoutCandidate,
    laid_out,
)
from trainwright.tasks.allocate.layouts.relaxation import MOST_DEVICES, as_planned, relaxed
from trainwright.tasks.allocate.pipelines.choose_pipeline import (
    given_pipeline,
    least_gap,
    pipeline_alone,
    with_pipeline,
)
from trainwright.tasks.allocate.plan.configuration import Configuration
from trainwright.tasks.allocate.problem import PlanningProblem
from trainwright.tasks.allocate.strategies import best
from trainwright.tasks.errors import Infeasible
from trainwright.tasks.runs.artefacts.layout import DATA_PARALLEL, Sync
from trainwright.tasks.spec.train_spec import LayoutSpec
from trainwright.tasks.units import plain as short

_TRIED, _TRIED_IF_LARGE, _LARGE = 4, 1, 16
"""How many choices of devices of the relaxed problem are tried; fewer from this many devices on."""


@dataclass(frozen=True)
class JointChoice:
    """Devices with their layout."""

    laid: LaidOut
    gap: float | None
    """the share by which any other layout and devices can be better at most; None: not known"""


def with_devices(
    problem: PlanningProblem, plain: Configuration | None, again: LaidOut | None = None
) -> JointChoice:
    """The best layout with its devices.

    `plain` is the best data parallel configuration, `again` the best in which devices recompute; it
    is compared with the others as one of them. Raises BadInput if the model or the devices do not
    permit the job's layout, and Infeasible if no layout meets the limits, with what would have to
    be how large.
    """
    found = _found(problem, plain, again)
    if found is None or any(found.laid.chosen.misses(problem.limits)):
        raise _why_none(problem, plain, found)
    return found


def _found(
    problem: PlanningProblem, plain: Configuration | None, again: LaidOut | None = None
) -> JointChoice | None:
    """The best layout, or the one that comes closest to memory and limits; None: there is none."""
    wanted, goal = problem.job.train.layout, problem.goal
    if (pipelines := problem.job.train.pipeline) is not None:
        given = given_pipeline(problem, pipelines, plain)
        return JointChoice(given, least_gap(problem, given.chosen.configuration))
    named = _is_named(problem)
    if named and plain is not None and plain.size == 1:
        problem, plain = _of_several(problem, plain)
    averages = problem.job.train.averages is not None
    eased, permitted = None, tuple[Sync, ...]()
    if named or len(problem.devices) <= MOST_DEVICES:
        permitted = ("average",) if averages else _permitted(wanted)
        eased = relaxed(problem, permitted, on_one_machine=named or plain is None)
    starts = [] if plain is None else [plain]
    if eased is not None:
        starts += _promising(problem, eased, plain)
    laid = [] if again is None else [again]
    laid += [laid_out(one, wanted, goal, problem.limits) for one in starts]
    if not laid:
        alone = pipeline_alone(problem)
        if alone is None:
            return None
        return JointChoice(alone, least_gap(problem, alone.chosen.configuration))
    first = plain if again is None else again.chosen.configuration
    chosen = _with_others(problem, with_pipeline(problem, _best(problem, laid, first)), laid)
    one = chosen.chosen.configuration
    if one.layout is not None and one.layout.has_stages:
        return JointChoice(chosen, least_gap(problem, one))
    # The bound is of models that recompute nothing.
    bounded = eased is not None and not (one.layout is not None and one.layout.recomputes)
    return JointChoice(chosen, _gap(problem, permitted, one) if bounded else None)


def _is_named(problem: PlanningProblem) -> bool:
    """Whether the job asks for a layout other than data parallel."""
    train = problem.job.train
    return train.averages is not None or not _leaves_it_open(train.layout)


def _with_others(problem: PlanningProblem, chosen: LaidOut, laid: Sequence[LaidOut]) -> LaidOut:
    """The choice, with the best plan of every other layout among the others."""

    def kind(one: LayoutCandidate) -> object:
        layout = one.configuration.layout
        return one.configuration.strategy, layout is not None and layout.recomputes

    def value(one: LayoutCandidate) -> tuple[tuple[float, float], float]:
        return one.misses(problem.limits), one.configuration.value(problem.goal)

    others = list(chosen.others)
    known = {kind(one) for one in (chosen.chosen, *others)}
    for one in sorted((one for each in laid for one in (each.chosen, *each.others)), key=value):
        if kind(one) not in known:
            known.add(kind(one))
            others.append(one)
    return replace(chosen, others=others)


def _why_none(
    problem: PlanningProblem, plain: Configuration | None, found: JointChoice | None
) -> Infeasible:
    """Why no layout meets the limits, and what would have to be how large."""
    if found is None:
        return infeasible(problem, more=_links(problem))
    laid, chosen = found.laid, found.laid.chosen
    given = problem.job.train.pipeline is not None or _is_named(problem)
    if chosen.shortage is not None:
        alone = not given and plain is None and fastest_of_all(problem)[1] is not None
        if not alone:
            name = _asked_layout(problem, chosen) if problem.job.train.layout != "auto" else ""
            return too_little_memory(problem, [chosen, *laid.others], name)
        return infeasible(problem, more=_links(problem))
    if plain is None and not given and fastest_of_all(problem)[1] is not None:
        return infeasible(problem, chosen, _links(problem))
    return _too_slow_or_dear(problem, laid, _links(problem))


def _links(problem: PlanningProblem) -> str:
    """The bandwidth that would be enough for the limits, in words; empty: it does not help."""

    def meets(faster: PlanningProblem) -> bool:
        chosen, _ = choose_batch(faster)
        found = _found(faster, None if chosen is None else chosen.best)
        return found is not None and not any(found.laid.chosen.misses(faster.limits))

    limits = problem.limits
    if math.isinf(limits.deadline_s) and math.isinf(limits.budget):
        return ""
    return enough_bandwidth(problem, meets)


def _leaves_it_open(wanted: LayoutSpec | str) -> bool:
    """Whether the job asks for no layout but data parallel."""
    if isinstance(wanted, LayoutSpec):
        return wanted.dense in ("auto", "sum")
    return wanted in ("auto", DATA_PARALLEL)


def _permitted(wanted: LayoutSpec | str) -> tuple[Sync, ...]:
    """The ways in which the job lets dense layers be kept equal, beside sums."""
    only: dict[str, tuple[Sync, ...]] = {
        "late-multiply": ("factors",),
        "sharded": ("rows",),
        "factors": ("factors",),
        "rows": ("rows",),
        "auto": ("factors", "rows"),
        "hybrid": ("factors", "rows"),
    }
    return only.get(wanted.dense if isinstance(wanted, LayoutSpec) else wanted, ())


def _of_several(
    problem: PlanningProblem, plain: Configuration
) -> tuple[PlanningProblem, Configuration]:
    """The problem with at least two devices, and its best; as it is if they can't be had."""
    devices = problem.job.devices.model_copy(update={"min_count": 2})
    job = problem.job.model_copy(update={"devices": devices})
    several = replace(problem, job=job)
    if len(problem.devices) < 2 or problem.job.devices.max_count == 1:
        return problem, plain
    found, _ = choose_batch(several)
    return (problem, plain) if found is None or found.best is None else (several, found.best)


def _promising(
    problem: PlanningProblem, eased: PlanningProblem, plain: Configuration | None
) -> Iterator[Configuration]:
    """The relaxed problem's best choices of devices, without the one that is known."""
    found, _ = choose_batch(eased)
    if found is None or found.best is None:
        return
    known = set() if plain is None else {(plain.counts, plain.batch, plain.accumulation)}
    ranked = sorted(found.seen, key=lambda one: (one.excess(eased.limits), one.value(eased.goal)))
    count = 0
    for one in [found.best, *ranked]:
        key = (one.counts, one.batch, one.accumulation)
        if key in known or not 1 < one.size <= MOST_COMPARED:
            continue
        known.add(key)
        yield as_planned(problem, one)
        count += 1
        if count >= (_TRIED if one.size < _LARGE else _TRIED_IF_LARGE):
            return


def _best(
    problem: PlanningProblem, laid: Sequence[LaidOut], plain: Configuration | None
) -> LaidOut:
    """The best of some, by the rule of the global batch; the known devices unless it pays."""
    least = min(one.chosen.misses(problem.limits) for one in laid)
    close = [one for one in laid if one.chosen.misses(problem.limits) == least]
    picked = preferred(problem, [one.chosen.configuration for one in close])
    found = next(one for one in close if one.chosen.configuration is picked)
    if plain is None or laid[0] not in close or found is laid[0]:
        return found
    first, value = laid[0].chosen.configuration, picked.value(problem.goal)
    gain = 0.0 if picked.batch < first.batch else LEAST_GAIN
    return found if value < first.value(problem.goal) * (1 - gain) else laid[0]


def _gap(problem: PlanningProblem, syncs: Sequence[Sync], chosen: Configuration) -> float:
    """How much better any layout could be at the plan's global batch."""
    if problem.job.train.averages == "mixed":  # layers that are not averaged may be either
        syncs = (*syncs, "factors", "rows")
    value = chosen.value(problem.goal)
    bound = best(bounding(problem, syncs, chosen.batch).request(chosen.batch)).bound
    return max(0.0, 1 - bound / value) if value > 0 else 0.0


def _asked_layout(problem: PlanningProblem, chosen: LayoutCandidate) -> str:
    """The layout that a message is about: as the job names it, or as it is."""
    wanted, layout = problem.job.train.layout, chosen.configuration.layout
    if isinstance(wanted, str) and wanted != "auto":
        return f"layout {wanted}"  # another name if not all layers permit it
    return f"layout {layout.name}" if layout is not None else "this layout"


def _too_slow_or_dear(problem: PlanningProblem, found: LaidOut, links: str) -> Infeasible:
    """Why the layout that comes closest can't be used; `links` would help."""
    one, limits = found.chosen.configuration, problem.limits
    name = _asked_layout(problem, found.chosen)
    late = one.cost.upper_duration_s > min(limits.deadline_s, one.available_s())
    nearest = rounded_up(one.cost.upper_duration_s if late else one.cost.upper_cost)
    what = "deadline" if late else "budget"
    unit = " s" if late else ""
    limit = min(limits.deadline_s, one.available_s()) if late else limits.budget
    more = f"; {links}" if links else ""
    return Infeasible(
        f"no feasible plan: the {what} of {short(limit, 6)}{unit} binds: the nearest that was "
        f"found with {name} is {short(nearest, 4)}{unit}{more}",
        feasible=False,
        binding=what,
        **{"nearest_deadline_s" if late else "nearest_budget": nearest},
    )
