"""`AllocateOperator` and `ReleaseOperator`: lease devices for a run, and release them."""

from __future__ import annotations

from typing import Any

from airflow.sdk import Context

from trainwright.operators.base import StepOperator


class AllocateOperator(StepOperator):
    """Choose and lease the devices that meet the job's limits at the least energy, cost or time.

    If no plan meets the limits it fails; the message names the limit that binds and the nearest
    feasible value. If others hold the devices, the task is deferred with a place in the queue,
    and plans with the free devices when its turn comes. Pair it with `ReleaseOperator` as
    teardown; a lease also expires.

    | input | default | meaning |
    |---|---|---|
    | those of `StepOperator` | | |

    Returns `{"run", "artefact", "feasible", "devices", "global_batch_size", "layout",
    "predicted_duration_s"}`; `layout` is in words.

    | failure | what Airflow does |
    |---|---|
    | no plan meets the limits, bad input | fails without a retry |
    | unreachable service, another process holds the run, killed | retries |
    """

    step = "allocate"


class ReleaseOperator(StepOperator):
    """Release a run's devices. For teardown: idempotent; succeeds even if the run failed.

    A training that still runs for this DAG run is stopped first, with a checkpoint. (A training
    task that was killed while no triggerer was alive leaves its process behind.)

    | input | default | meaning |
    |---|---|---|
    | those of `StepOperator` | | |

    Returns `{"run", "released"}`.

    | failure | what Airflow does |
    |---|---|
    | no such run | fails without a retry |
    | unreachable service, another process holds the run, killed | retries |
    """

    step = "release"

    def work(self, context: Context) -> dict[str, Any]:
        """Release what the run holds."""
        from trainwright.tasks.allocate.step import release
        from trainwright.tasks.train.launcher import background
        from trainwright.tasks.units import counted

        found = self.open(context)
        if background.stop_unfollowed(found):
            self.log.warning(
                "stopped a training whose task had ended; its newest checkpoint is kept"
            )
        reference = release(found)
        self.log.info("%s released", counted(reference["released"], "device"))
        return reference
