"""The least deadline or budget with which a job has a plan, if it has none with its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainwright.tasks.allocate.infeasible.binding_limits import rounded_up
from trainwright.tasks.errors import Infeasible
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.spec.job import Job
from trainwright.tasks.units import plain

MOST_DEVICES = 64
"""Of more devices, tighter limits are not tried: each try is a plan."""
_CLOSE = 0.995
"""A nearest limit is the least one if this share of it is not feasible."""
_MOST_TRIES = 4


def nearest_limit(error: Infeasible, job: Job, make: Callable[[Job], Plan]) -> Infeasible:
    """The error with the least feasible limit, instead of that of the plan that was found first.

    Which layout or devices a plan has depends on its limits, so that a tighter one may be feasible
    with others. `make` plans a job. An error that names two limits, or none, is not changed.
    """
    details: dict[str, Any] = dict(error.details)
    names = [name for name in ("nearest_deadline_s", "nearest_budget") if name in details]
    if len(names) != 1:
        return error
    (name,) = names
    field, unit = ("deadline", " s") if name == "nearest_deadline_s" else ("budget", "")
    first = nearest = float(details[name])
    for _ in range(_MOST_TRIES):
        tighter = job.objective.model_copy(update={field: _CLOSE * nearest})
        try:
            plan = make(job.model_copy(update={"objective": tighter}))
        except Infeasible:
            break
        most = plan.not_exceeded
        if most is None:
            break
        needed = most.duration_s if field == "deadline" else most.cost
        if needed is None:
            break
        nearest = min(_CLOSE * nearest, rounded_up(needed))
    if nearest == first:
        return error
    details[name] = nearest
    if "one_more" in details:
        details["one_more"] = {
            kind: value for kind, value in details["one_more"].items() if value < nearest
        }
    message = str(error).replace(f"{plain(first, 4)}{unit}", f"{plain(nearest, 4)}{unit}")
    return Infeasible(message, **details)
