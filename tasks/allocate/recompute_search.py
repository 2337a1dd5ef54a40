"""Whether some devices of a plan should recompute, and the best plan in which they do.

A step that does not fit in a device's memory can be split into more micro-batches, or its modules
can be recomputed. Which takes less time depends on the devices, so plans are compared: for m = 1,
2, 4, … samples at once on the fastest kind of device, and fewer on slower ones in proportion to
their speed, each kind recomputes what lets its memory hold them for the least time (nothing, if it
holds them anyway). With that fixed, a kind has a curve like any other, and the search of plans is
the same. The best plan's own micro-batches are tried as a last such choice, and before it all that
saves memory. Recomputation does not change the mathematics of training.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from trainwright.tasks.allocate.batch_choice import choose_batch, preferred
from trainwright.tasks.allocate.layouts.choose import LayoutChoice
from trainwright.tasks.allocate.layouts.planning import LEAST_GAIN, LaidOut, LayoutCandidate
from trainwright.tasks.allocate.layouts.words import ALL_SUMMED
from trainwright.tasks.allocate.plan.configuration import Configuration
from trainwright.tasks.allocate.plan.kinds import Kind, largest_batch
from trainwright.tasks.allocate.plan.search_request import SearchResult
from trainwright.tasks.allocate.problem import PlanningProblem
from trainwright.tasks.allocate.recompute.recompute_words import recompute_words
from trainwright.tasks.allocate.recompute.recomputing_curves import RecomputingCurves
from trainwright.tasks.errors import BadInput
from trainwright.tasks.runs.artefacts.layout import DATA_PARALLEL
from trainwright.tasks.spec.train_spec import LayoutSpec, TrainSpec

_REFINED = 2
"""How often the best plan's own micro-batches are tried."""
_Names = tuple[tuple[str, ...], ...]
"""The modules that each kind of device recomputes, in the order of the estimate's curves."""


@dataclass(frozen=True)
class RecomputingPlan:
    """The best plan in which some devices recompute."""

    problem: PlanningProblem
    """the problem with the kinds' curves as they are then"""
    chosen: SearchResult
    found: list[SearchResult]
    names: _Names
    curves: RecomputingCurves

    @property
    def best(self) -> Configuration:
        """The configuration."""
        assert self.chosen.best is not None
        return self.chosen.best

    def laid_out(self, result: Configuration, plain: Configuration | None) -> LaidOut:
        """A configuration with its layout, and why; `plain` is the best one without."""
        choice = LayoutChoice(result)
        layout, estimate = choice.layout({}), self.problem.model.estimate
        by_device = {
            device.id: self.names[estimate.curves.index(estimate.curve(device))]
            for device, _ in result.devices()
        }
        layout = layout.model_copy(
            update={
                "pipelines": [
                    one.model_copy(
                        update={
                            "stages": [
                                stage.model_copy(
                                    update={"recompute": list(by_device[stage.device])}
                                )
                                for stage in one.stages
                            ]
                        }
                    )
                    for one in layout.pipelines
                ]
            }
        )
        words = recompute_words(result, by_device, self.curves)
        why = "as train.layout says"
        if plain is None:
            why = "without recomputation, no device's memory holds a step"
        elif self.problem.job.train.recomputes == "auto":
            why = (
                f"{plain.accumulation} micro-batches without recomputation take longer"
                if plain.accumulation > result.accumulation
                else "without recomputation, memory limits the devices' shares"
            )
        others = []
        if plain is not None:
            where = f"on {plain.size} devices" if plain.size > 1 else "on one device"
            others = [LayoutCandidate(plain, f"{ALL_SUMMED} {where}, without recomputation")]
        return LaidOut(LayoutCandidate(replace(result, layout=layout), words), others, why)


def recomputing(problem: PlanningProblem, plain: Configuration | None) -> RecomputingPlan | None:
    """The best plan with recomputation; None if it is not wanted, or nothing is gained by it.

    `plain` is the best plan without. None too if the job asks for all of it and no plan is feasible
    with it. Raises BadInput if the job asks for recomputation where there can be none.
    """
    wanted, step = problem.job.train.recomputes, problem.model.estimate.step
    if wanted == "none" or problem.job.train.pipeline is not None:
        return None  # stages have their own (`pipelines.recomputed_stages`)
    why_not = _why_not(problem)
    if wanted == "all" and why_not:
        raise BadInput(f"train.layout.recompute: got 'all'; {why_not}")
    if why_not or step is None or (wanted == "auto" and not _memory_binds(problem, plain)):
        return None
    curves = RecomputingCurves(step, problem.model.estimate.units)
    if wanted == "all":
        return _search(problem, curves, _leanest(problem, curves))
    best: RecomputingPlan | None = None
    tried = set[_Names]()
    for names in _levels(problem, curves):
        if any(names) and names not in tried:
            tried.add(names)
            best = _better(problem, best, _search(problem, curves, names))
    for _ in range(_REFINED):
        if best is None or (names := _of_configuration(problem, curves, best)) in tried:
            break
        tried.add(names)
        best = _better(problem, best, _search(problem, curves, names))
    if best is None or plain is None:
        return best
    value, least = best.best.value(problem.goal), plain.value(problem.goal) * (1 - LEAST_GAIN)
    picked = preferred(problem, [plain, best.best])
    return best if picked is best.best and value < least else None


def leanest_problem(problem: PlanningProblem) -> PlanningProblem:
    """The problem with all kinds recomputing as much as helps; as it is if nothing may be."""
    step = problem.model.estimate.step
    if problem.job.train.recomputes == "none" or _why_not(problem) or step is None:
        return problem
    curves = RecomputingCurves(step, problem.model.estimate.units)
    return _with_names(problem, curves, _leanest(problem, curves))


def _why_not(problem: PlanningProblem) -> str | None:
    """Why nothing can be recomputed in a job's plans; None if it can."""
    train, estimate = problem.job.train, problem.model.estimate
    if not _only_sums(train):
        return "allowed with sums of gradients only (layout data-parallel, dense sum)"
    if estimate.step is None:
        return "the estimate does not say what each module keeps; extract and estimate again"
    if not estimate.layers or any(one.time_knots is None for one in estimate.curves):
        return "the estimate does not say what each layer costs; estimate again"
    return None


def _only_sums(train: TrainSpec) -> bool:
    if train.averages is not None or train.pipeline is not None:
        return False
    if isinstance(train.layout, LayoutSpec):
        return train.layout.dense in ("auto", "sum")
    return train.layout in ("auto", DATA_PARALLEL)


def _memory_binds(problem: PlanningProblem, plain: Configuration | None) -> bool:
    """Whether memory keeps a device from its share of a step, or forces micro-batches."""
    if plain is None or plain.accumulation > 1:
        return True
    rates = {kind.index: _rate(kind) for kind in problem.topology.kinds}
    used = sum(rates[share.kind.index] * share.ranks for share in plain.shares)
    there = {share.kind.index for share in plain.shares}
    for kind in problem.topology.kinds:
        whole = used if kind.index in there else used + rates[kind.index]
        due = math.ceil(plain.batch * rates[kind.index] / whole)
        if largest_batch(kind.curve, due, 0.0, _sharing(problem, kind)) < due:
            return True
    return False


def _rate(kind: Kind) -> float:
    """Samples per second in a large batch."""
    sizes = kind.knots
    size = sizes[-1] if sizes else 1
    return size / kind.curve.median_s(size)


def _sharing(problem: PlanningProblem, kind: Kind) -> int:
    """How many ranks of a kind may share a memory."""
    return problem.topology.most_sharing_memory if kind.shares_memory else 1


def _limit(problem: PlanningProblem, kind: Kind) -> float:
    """The memory for a rank of a kind; infinite if it is not known."""
    limit = kind.curve.memory_limit_bytes
    if limit is None:
        return math.inf
    # Gradients are kept between micro-batches, of which there may be several.
    return limit / _sharing(problem, kind) - problem.model.kept_bytes(2)


def _by_curve(problem: PlanningProblem, of_kind: dict[int, tuple[str, ...]]) -> _Names:
    """The kinds' modules, in the order of the estimate's curves."""
    curves = problem.model.estimate.curves
    found: list[tuple[str, ...]] = [()] * len(curves)
    for kind in problem.topology.kinds:
        found[curves.index(kind.curve)] = of_kind[kind.index]
    return tuple(found)


def _levels(problem: PlanningProblem, curves: RecomputingCurves) -> Iterator[_Names]:
    """What the kinds recompute for 1, 2, 4, … samples at once, and all that saves memory."""
    kinds = problem.topology.kinds
    rates = {kind.index: _rate(kind) for kind in kinds}
    fastest, most = max(rates.values()), max(problem.sizes)
    least = min(
        largest_batch(kind.curve, most, problem.model.kept_bytes(2), _sharing(problem, kind))
        * fastest
        / rates[kind.index]
        for kind in kinds
    )
    at_once = 1 << max(0, math.floor(math.log2(max(1.0, least))))
    leanest = _leanest(problem, curves)
    while at_once < 2 * most:
        names = _by_curve(
            problem,
            {
                kind.index: _names(
                    problem, curves, kind, math.ceil(at_once * rates[kind.index] / fastest)
                )
                for kind in kinds
            },
        )
        yield names
        if names == leanest:  # as for more samples
            return
        at_once *= 2
    yield leanest


def _names(
    problem: PlanningProblem,
    curves: RecomputingCurves,
    kind: Kind,
    samples: int,
    *,
    exact: bool = False,
) -> tuple[str, ...]:
    limit = _limit(problem, kind)
    return () if math.isinf(limit) else curves.names_for(kind.curve, samples, limit, exact=exact)


def _of_configuration(
    problem: PlanningProblem, curves: RecomputingCurves, best: RecomputingPlan
) -> _Names:
    """What the kinds have to recompute for the micro-batches of a configuration."""
    one = best.best
    samples = {kind.index: 1 for kind in problem.topology.kinds}
    for device, batch in one.devices():
        kind = problem.model.kind(device)
        samples[kind.index] = max(samples[kind.index], math.ceil(batch / one.accumulation))
    return _by_curve(
        problem,
        {
            kind.index: _names(problem, curves, kind, samples[kind.index], exact=True)
            for kind in problem.topology.kinds
        },
    )


def _leanest(problem: PlanningProblem, curves: RecomputingCurves) -> _Names:
    """What makes a step's memory least, for every kind."""
    return _by_curve(
        problem,
        {kind.index: curves.leanest(kind.curve) for kind in problem.topology.kinds},
    )


def _with_names(
    problem: PlanningProblem, curves: RecomputingCurves, names: _Names
) -> PlanningProblem:
    estimate = problem.model.estimate
    changed = [
        curves.with_modules(curve, some) for curve, some in zip(estimate.curves, names, strict=True)
    ]
    model = problem.model.with_estimate(estimate.model_copy(update={"curves": changed}))
    return PlanningProblem.of(problem.job, model, problem.devices, problem.max_accumulation)


def _search(
    problem: PlanningProblem, curves: RecomputingCurves, names: _Names
) -> RecomputingPlan | None:
    """The best plan if the kinds recompute these modules."""
    changed = _with_names(problem, curves, names)
    chosen, found = choose_batch(changed)
    if chosen is None or chosen.best is None:
        return None
    return RecomputingPlan(changed, chosen, found, names, curves)


def _better(
    problem: PlanningProblem, one: RecomputingPlan | None, other: RecomputingPlan | None
) -> RecomputingPlan | None:
    if one is None or other is None:
        return one or other
    return one if preferred(problem, [one.best, other.best]) is one.best else other
