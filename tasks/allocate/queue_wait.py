"""Counts the expected wait in a cluster's queue in what a job's deadline means.

A cluster's hosts are asked for when the training starts, and come when its queue grants them. The
deadline of such a job counts from the request: the expected wait and the training's duration
together must not exceed it. If the cluster does not say when it would grant them, the plan says
that, and the deadline applies to the duration alone.
"""

from __future__ import annotations

from collections.abc import Callable

from trainwright.tasks.errors import Infeasible
from trainwright.tasks.runs.artefacts.expected_wait import QueueWait
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.settings import Settings
from trainwright.tasks.slurm.expected_start import expected_start
from trainwright.tasks.spec.job import Job
from trainwright.tasks.spec.pool import load_pool
from trainwright.tasks.units import seconds


def with_queue_wait(make: Callable[[Job], Plan], job: Job, settings: Settings) -> Plan:
    """The plan that `make` makes for a job whose deadline includes the expected wait.

    Raises Infeasible if no plan meets the deadline after the wait, and the errors of `make`.
    """
    plan, deadline_s = make(job), job.objective.deadline
    wait = _expected(plan, job, settings)
    if wait is None or _in_time(plan, wait, deadline_s):
        return plan.model_copy(update={"queue_wait": wait})
    assert deadline_s is not None
    assert wait.expected_s is not None
    left_s = deadline_s - wait.expected_s
    if left_s > 0:
        sooner = job.objective.model_copy(update={"deadline": left_s})
        try:
            plan = make(job.model_copy(update={"objective": sooner}))
        except Infeasible as error:
            raise _late(job, wait, error.details.get("nearest_deadline_s")) from error
        wait = _expected(plan, job, settings)
        if wait is not None and _in_time(plan, wait, deadline_s):
            return plan.model_copy(update={"queue_wait": wait, "deadline_s": deadline_s})
    most = plan.not_exceeded
    raise _late(job, wait, None if most is None else most.duration_s)


def _expected(plan: Plan, job: Job, settings: Settings) -> QueueWait | None:
    """The wait of a plan's hosts; None if none of them waits in a cluster's queue."""
    engines = {device.engine for device in plan.devices}
    if "kubernetes" in engines:
        return QueueWait(engine="kubernetes", unknown="Kubernetes does not say when")
    if "slurm" not in engines:
        return None
    found = expected_start(load_pool(job.pool), plan.devices, settings)
    return QueueWait(engine="slurm", expected_s=found.after_s, unknown=found.why)


def _in_time(plan: Plan, wait: QueueWait, deadline_s: float | None) -> bool:
    """Whether the training ends by the deadline, as far as the wait is known."""
    if deadline_s is None or wait.expected_s is None or plan.not_exceeded is None:
        return True
    return wait.expected_s + plan.not_exceeded.duration_s <= deadline_s


def _late(job: Job, wait: QueueWait | None, training_s: float | None) -> Infeasible:
    """`training_s`: the least time that the training needs, if it is known."""
    deadline_s, wait_s = job.objective.deadline, None if wait is None else wait.expected_s
    needed_s = None if training_s is None or wait_s is None else training_s + wait_s
    nearest = "" if needed_s is None else f"; the nearest feasible one is {seconds(needed_s)}"
    return Infeasible(
        f"no feasible plan: the deadline of {seconds(deadline_s or 0.0)} binds: Slurm expects to "
        f"grant the hosts in {seconds(wait_s or 0.0)}, which counts{nearest}",
        binding="deadline",
        deadline_s=deadline_s,
        queue_wait_s=wait_s,
        **({} if needed_s is None else {"nearest_deadline_s": needed_s}),
    )
