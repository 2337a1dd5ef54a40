"""Step `allocate`: plans which devices a run uses, and leases them.

Read `step` first. `planner` makes the plan: `problem` defines the goal, `batch_choice` tries global
batches, `strategies` searches. `alternatives` and `front` list other configurations, and
`infeasible` explains why there is no plan. `acquire` leases the devices, `replan` plans again,
`joint_planner` plans several jobs (`schedule`), `preview` plans without a run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainwright.tasks.lazy import exports

if TYPE_CHECKING:
    from trainwright.tasks.allocate.preview import plan_job, plan_jobs

__all__ = ["plan_job", "plan_jobs"]

__getattr__ = exports(
    __name__,
    {
        "plan_job": "preview",
        "plan_jobs": "preview",
    },
)
