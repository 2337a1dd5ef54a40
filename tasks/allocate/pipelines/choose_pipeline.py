"""Whether a plan gets a pipeline: as the job says, or if it is better than other layouts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from trainwright.estimator.curves import DeviceCurve
from trainwright.tasks.allocate.layouts.choose import MOST_COMPARED
from trainwright.tasks.allocate.layouts.planning import LEAST_GAIN, LaidOut, LayoutCandidate
from trainwright.tasks.allocate.layouts.stage_groups import stage_groups
from trainwright.tasks.allocate.pipelines.pipeline_numbers import FEW_DEVICES
from trainwright.tasks.allocate.pipelines.pipeline_plans import PipelinePlan, PipelinePlanner
from trainwright.tasks.allocate.pipelines.pipeline_rules import refuse, why_no_pipeline
from trainwright.tasks.allocate.pipelines.pipeline_search import MOST_DEVICES
from trainwright.tasks.allocate.plan.configuration import Configuration
from trainwright.tasks.allocate.plan.topology import machine_of
from trainwright.tasks.allocate.problem import PlanningProblem
from trainwright.tasks.errors import BadInput
from trainwright.tasks.spec.pool import Device
from trainwright.tasks.spec.train_spec import LayoutSpec
from trainwright.tasks.units import plain

_LEAST_SAMPLE_S = 1e-12
_MOST_KINDS = 4
_SIZES = 4
"""global batches for which pipelines are searched, if the job leaves the batch open"""


def given_pipeline(
    problem: PlanningProblem, spec: LayoutSpec, base: Configuration | None
) -> LaidOut:
    """The pipeline that the job asks for; `base` is the best data parallel configuration.

    If none fits into memory, it is the one that comes closest. Raises BadInput if the model or the
    devices do not permit one.
    """
    refuse(problem, spec)
    planner = PipelinePlanner(problem, spec)
    sizes = [base.batch] if base is not None else _sizes(problem)
    found = [one for size in sizes for one in planner.plans(size)[:1]]
    if not found:
        nearest = (planner.nearest(size) for size in reversed(sizes))
        found = [one for one in nearest if one is not None][:1]
    if not found:
        raise BadInput(
            "train.layout: no pipeline has these numbers of stages, replicas and micro-batches "
            f"with at least {problem.job.devices.min_count} devices and a batch of {sizes[0]}"
        )
    best = _best(problem, found)
    others = [] if base is None else [LayoutCandidate(base, "all layers data parallel")]
    return _laid(problem, best, others, "as train.layout says")


def nearest_pipeline(problem: PlanningProblem) -> LayoutCandidate | None:
    """The pipeline that needs least memory beyond what there is, where the planner may choose one.

    It is searched for the smallest global batch that permits one. None if none does.
    """
    if not _is_compared(problem, always=True):
        return None
    brief = len(problem.devices) > FEW_DEVICES
    planner = PipelinePlanner(problem, LayoutSpec(name="pipeline"), brief=brief)
    found = (planner.nearest(size) for size in problem.sizes if size > 1)
    return next((one.candidate for one in found if one is not None), None)


def with_pipeline(problem: PlanningProblem, laid: LaidOut) -> LaidOut:
    """A layout compared with the best pipeline, if the job leaves the choice to the planner.

    The pipeline is chosen if only it fits, or if it is better by more than `LEAST_GAIN`. It is not
    searched if no pipeline can be that much better, but for few devices on several machines.
    """
    chosen, limits, goal = laid.chosen, problem.limits, problem.goal
    misses = any(chosen.misses(limits))
    most = math.inf if misses else _most_gain(problem, chosen.configuration)
    promises = misses or most > LEAST_GAIN
    if not _is_compared(problem, always=promises):
        return laid
    brief = not promises or (not misses and len(problem.devices) > FEW_DEVICES)
    sizes = [chosen.configuration.batch]
    if misses:
        sizes += [size for size in _sizes(problem) if size not in sizes]
    found = _pipelines(problem, sizes, brief=brief)
    if not found:
        return laid
    one, others = _best(problem, found), [chosen, *laid.others]
    mine, least = one.candidate.configuration.value(goal), chosen.configuration.value(goal)
    if misses and one.candidate.misses(limits) < chosen.misses(limits):
        why = _ONLY if chosen.shortage is not None else "the only layout that meets the limits"
        return _laid(problem, one, others, why)
    if not any(one.candidate.misses(limits)) and mine < least * (1 - LEAST_GAIN):
        less = f"{plain(100 * (1 - mine / least), 2)} % less {goal}"
        return _laid(problem, one, others, f"{less} than {_name(chosen)}, by prediction")
    return replace(laid, others=[*laid.others, one.candidate])


_ONLY = "the only layout that fits"


def _name(one: LayoutCandidate) -> str:
    layout, name = one.configuration.layout, one.configuration.strategy
    return f"{name} with recomputation" if layout is not None and layout.recomputes else name


def _pipelines(
    problem: PlanningProblem, sizes: Sequence[int], *, brief: bool = False
) -> list[PipelinePlan]:
    """The best pipeline for each global batch that fits into memory.

    If money counts, devices of one kind alone are tried too: all together may be too dear.
    """
    spec, found = LayoutSpec(name="pipeline"), list[PipelinePlan]()
    for some in _device_choices(problem):
        planner = PipelinePlanner(replace(problem, devices=some), spec, brief=brief)
        found += [one for size in sizes for one in planner.plans(size)[:1]]
    return found


def _device_choices(problem: PlanningProblem) -> list[tuple[Device, ...]]:
    found = [problem.devices]
    if problem.goal == "time" and math.isinf(problem.limits.budget):
        return found
    kinds: dict[int, list[Device]] = {}
    for device in problem.devices:
        kinds.setdefault(problem.model.kind(device).index, []).append(device)
    least = max(2, problem.job.devices.min_count)
    alone = [tuple(own) for own in kinds.values() if len(own) >= least]
    return found + (alone[:_MOST_KINDS] if len(kinds) > 1 else [])


def _most_gain(problem: PlanningProblem, chosen: Configuration) -> float:
    """The share of a configuration's step that a pipeline can save at most.

    No step is shorter than that of devices which compute all the time, at the highest rate of their
    curves: those that the job may use, or if it minimises energy or cost, those of the
    configuration, because more devices need no less of either.
    """
    few = problem.goal != "time"
    devices = [device for device, _ in chosen.devices()] if few else list(problem.devices)
    if len(devices) < 2 or len(problem.devices) > MOST_COMPARED:
        return 0.0
    most = min(MOST_DEVICES, problem.job.devices.max_count or len(devices))
    ideal_s = _ideal_s(problem, devices, chosen.batch, most)
    return 1 - ideal_s / chosen.cost.step_s.median


def _ideal_s(problem: PlanningProblem, devices: Sequence[Device], batch: int, most: int) -> float:
    """The step of so many devices that compute all the time, at the highest rate of their curves.

    The fastest ones of `devices`.
    """
    model = problem.model
    rates = sorted((_rate(model.kind(device).curve) for device in devices), reverse=True)
    return batch / sum(rates[:most])


def least_gap(problem: PlanningProblem, chosen: Configuration) -> float | None:
    """By what share any plan of the same global batch can be faster at most.

    No step is shorter than that of all devices that the job may use, if they computed all the time.
    None: not known, if the job minimises energy or cost.
    """
    if problem.goal != "time" or not problem.model.estimate.layers:
        return None
    most = problem.job.devices.max_count or len(problem.devices)
    ideal_s = _ideal_s(problem, problem.devices, chosen.batch, most)
    saved_s = problem.model.steps(chosen.batch) * (chosen.cost.step_s.median - ideal_s)
    return min(1.0, max(0.0, saved_s / chosen.value("time")))


def _rate(curve: DeviceCurve) -> float:
    """The most samples in a second."""
    return 1 / max(_LEAST_SAMPLE_S, min(seconds for _, seconds in curve.rates()))


def pipeline_alone(problem: PlanningProblem) -> LaidOut | None:
    """The best pipeline where no other layout is possible, or the one that comes closest.

    None if none fits into memory.
    """
    if not _is_compared(problem, always=True):
        return None
    found = _pipelines(problem, _sizes(problem))
    return _laid(problem, _best(problem, found), [], _ONLY) if found else None


def _is_compared(problem: PlanningProblem, *, always: bool) -> bool:
    """Whether pipelines are compared unasked."""
    if problem.job.train.layout != "auto" or why_no_pipeline(problem) is not None:
        return False
    machines = {machine_of(device) for device in problem.devices}
    return always or (len(machines) > 1 and len(problem.devices) <= MOST_DEVICES)


def _sizes(problem: PlanningProblem) -> list[int]:
    """Global batches to try, largest first: some of those that the job permits."""
    sizes = sorted(problem.sizes, reverse=True)
    if len(sizes) <= _SIZES:
        return sizes
    last = len(sizes) - 1
    return [sizes[last * number // (_SIZES - 1)] for number in range(_SIZES)]


def _best(problem: PlanningProblem, found: Sequence[PipelinePlan]) -> PipelinePlan:
    """The best one, by the job's goal for all its data."""
    goal, limits = problem.goal, problem.limits
    return min(
        found,
        key=lambda one: (one.candidate.misses(limits), one.candidate.configuration.value(goal)),
    )


def _laid(
    problem: PlanningProblem, one: PipelinePlan, others: Sequence[LayoutCandidate], rule: str
) -> LaidOut:
    layout, estimate = one.candidate.configuration.layout, problem.model.estimate
    spec = problem.job.train.pipeline
    given = spec is not None and spec.dense != "auto"
    assert layout is not None
    groups = stage_groups(layout, estimate.layers, estimate.units, given=given)
    return LaidOut(one.candidate, list(others), rule, groups, one.needs, one.compute_s)
