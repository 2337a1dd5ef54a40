"""What each proposal costs: traced in the sandbox, estimated and planned on the job's pool."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainwright.estimator.curves import Interval
from trainwright.estimator.predict.calibration import Calibration
from trainwright.estimator.structure import Structure
from trainwright.tasks.allocate.preview import finished_on, plan_structure
from trainwright.tasks.errors import Infeasible
from trainwright.tasks.extract import batch_spec, extract, tracer
from trainwright.tasks.recommend.proposals import Proposal
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.settings import Settings
from trainwright.tasks.spec.eligibility import usable
from trainwright.tasks.spec.job import Job
from trainwright.tasks.spec.pool import Pool
from trainwright.tasks.spec.recipe import with_recipe


@dataclass(frozen=True)
class Costs:
    """A proposal's parameters and its plan, or why there is no plan."""

    proposal: Proposal
    parameters: int
    plan: Plan | None
    refusal: Infeasible | None = None

    @property
    def duration_s(self) -> Interval | None:
        """The plan's training time."""
        return self.plan.predicted.duration_s if self.plan and self.plan.predicted else None

    @property
    def energy_j(self) -> Interval | None:
        """The plan's energy."""
        return self.plan.predicted.energy_j if self.plan and self.plan.predicted else None

    @property
    def cost(self) -> Interval | None:
        """The plan's cost, in the pool's currency."""
        return self.plan.predicted.cost if self.plan and self.plan.predicted else None

    @property
    def least_deadline_s(self) -> float | None:
        """The nearest feasible deadline, if the job's is too short."""
        found = self.refusal.details.get("nearest_deadline_s") if self.refusal else None
        return None if found is None else float(found)

    def spend(self, objective: str) -> float:
        """The median of what the job minimises; without a plan, the least deadline."""
        if self.plan is None:
            return self.least_deadline_s or float("inf")
        found = {"energy": self.energy_j, "cost": self.cost}.get(objective) or self.duration_s
        return found.median if found else float("inf")


def traced(
    proposals: Sequence[Proposal], job: Job, given: Collection[str], settings: Settings
) -> dict[str, Structure]:
    """The structure of each proposal by name, traced in the sandbox.

    `given` as in `with_recipe`. Raises BadInput, TrainwrightError if one can't be traced.
    """
    found = {}
    with tempfile.TemporaryDirectory(prefix="trainwright-recommend-") as name, tracer() as server:
        for one in proposals:
            train = with_recipe(job, one.recipe, given).train
            model = one.model()
            found[one.name] = extract(
                model.unpack(Path(name) / one.name),
                model.entry,
                {},
                limits=settings.extract_limits(),
                batch_spec=batch_spec(one.schema),
                optimizer=train.optimizer,
                precision=train.precision,
                label_smoothing=train.label_smoothing,
                server=server,
            )
    return found


def costs_of(
    proposals: Sequence[Proposal],
    structures: Mapping[str, Structure],
    job: Job,
    given: Collection[str],
    pool: Pool,
    settings: Settings,
    calibrations: Sequence[Calibration] = (),
) -> dict[str, Costs]:
    """The costs of proposals by name, each trained by its recipe where the job's fields allow it.

    `structures` as of `traced`, `given` as in `with_recipe`. Raises BadInput.
    """
    finished = finished_on(usable(pool, job), settings)
    found = {}
    for one in proposals:
        trained, structure = with_recipe(job, one.recipe, given), structures[one.name]
        plan, refusal = None, None
        try:
            plan = plan_structure(
                trained, pool, one.schema, structure, settings, calibrations, finished
            )
        except Infeasible as error:
            refusal = error
        found[one.name] = Costs(one, structure.parameters, plan, refusal)
    return found
