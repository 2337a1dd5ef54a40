"""Chooses devices and layout together.

The exact search (`search`) knows data parallel only. A search of the relaxed problem finds devices
that suit other layouts; the layouts are simulated on both. The least value of a third problem
(`layout_bound`) bounds what any plan could gain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from trainwright.tasks.allocate.batch_choice import choose_batch, preferred
from trainwright.tasks.allocate.infeasible import rounded_up
from trainwright.tasks.allocate.layouts.choose import MOST_COMPARED
from trainwright.tasks.allocate.layouts.layout_bound import bounding
from trainwright.tasks.allocate.layouts.planning import LEAST_GAIN, LaidOut, laid_out
from trainwright.tasks.allocate.layouts.relaxation import MOST_DEVICES, as_planned, relaxed
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


def with_devices(problem: PlanningProblem, plain: Configuration | None) -> JointChoice | None:
    """The best layout with its devices; `plain` is the best data parallel configuration.

    None if there is neither. Raises BadInput if the model or the devices do not permit the job's
    layout, and Infeasible if no devices meet the limits with it.
    """
    wanted, goal = problem.job.train.layout, problem.goal
    averages = problem.job.train.averages is not None
    named = averages or not _leaves_it_open(wanted)
    if named and plain is not None and plain.size == 1:
        problem, plain = _of_several(problem, plain)
    eased, permitted = None, tuple[Sync, ...]()
    if named or len(problem.devices) <= MOST_DEVICES:
        permitted = ("average",) if averages else _permitted(wanted)
        eased = relaxed(problem, permitted, on_one_machine=named or plain is None)
    starts = [] if plain is None else [plain]
    if eased is not None:
        starts += _promising(problem, eased, plain)
    if not starts:
        return None
    laid = [laid_out(one, wanted, goal, problem.limits) for one in starts]
    chosen = _best(problem, laid, plain)
    if any(chosen.chosen.misses(problem.limits)):
        if plain is None and not named and chosen.chosen.shortage is None:
            return None  # data parallel comes closest: its own search says what is nearest
        raise _infeasible(problem, chosen)
    gap = None if eased is None else _gap(problem, permitted, chosen.chosen.configuration)
    return JointChoice(chosen, gap)


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


def _infeasible(problem: PlanningProblem, found: LaidOut) -> Infeasible:
    """Why the job's layout can't be used, on the devices that come closest."""
    one, shortage = found.chosen.configuration, found.chosen.shortage
    wanted, limits = problem.job.train.layout, problem.limits
    name = f"layout {one.layout.name}" if one.layout is not None else "this layout"
    given = "train.layout: " if wanted != "auto" else ""
    if shortage is not None:
        return Infeasible(
            f"no feasible plan: memory binds: {given}{name}: {shortage}",
            feasible=False,
            binding="memory",
        )
    late = one.cost.upper_duration_s > min(limits.deadline_s, one.available_s())
    nearest = rounded_up(one.cost.upper_duration_s if late else one.cost.upper_cost)
    what = "deadline" if late else "budget"
    unit = " s" if late else ""
    limit = min(limits.deadline_s, one.available_s()) if late else limits.budget
    return Infeasible(
        f"no feasible plan: the {what} of {short(limit, 6)}{unit} binds: the nearest that was "
        f"found with {name} is {short(nearest)}{unit}",
        feasible=False,
        binding=what,
        **{"nearest_deadline_s" if late else "nearest_budget": nearest},
    )
