"""Take devices for a run, and give them back."""

from __future__ import annotations

from typing import Any

from airflow.sdk import Context

from trainwright.operators.base import StepOperator


class AllocateOperator(StepOperator):
    """Choose the devices that meet the job's limits at the least energy, cost or time, split the batch, lease them.

    Fails at once where no plan meets the limits, naming the one that binds and the nearest that would do. Where others hold the
    devices it is deferred, with its place in the queue, and plans anew with what is free when its turn comes. Pair it with
    `ReleaseOperator` as teardown; a lease also ends by expiry.

    | input | default | meaning |
    |---|---|---|
    | those of `StepOperator` | | |

    Returns `{"run", "artefact", "feasible", "devices", "global_batch_size", "predicted_duration_s"}`.

    | failure | what Airflow does |
    |---|---|
    | no plan meets the limits (the message names the one that binds), bad input | fails at once, no retry |
    | a service out of reach, the run held by another, killed | fails; retried as `retries` say |
    """

    step = "allocate"


class ReleaseOperator(StepOperator):
    """Give a run's devices back. Made to be a teardown: it succeeds whatever became of the run, and twice as well.

    What still trains for this DAG run is stopped first, with a checkpoint: a training task that was ended while no triggerer
    lived has left its process.

    | input | default | meaning |
    |---|---|---|
    | those of `StepOperator` | | |

    Returns `{"run", "released"}`.

    | failure | what Airflow does |
    |---|---|
    | no such run | fails at once, no retry |
    | a service out of reach, the run held by another, killed | fails; retried as `retries` say |
    """

    step = "release"

    def work(self, context: Context) -> dict[str, Any]:
        """Release what the run holds."""
        from trainwright.tasks.allocate.step import release
        from trainwright.tasks.train.launcher import background

        found = self.open(context)
        if background.stop_unfollowed(found):
            self.log.warning(
                "training went on though its task has ended: it was stopped; its newest checkpoint stays"
            )
        return release(found)
