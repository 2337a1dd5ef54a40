"""Store the model and seal the run."""

from __future__ import annotations

from typing import Any

from airflow.sdk import Context

from trainwright.operators.assets import announce, model_asset
from trainwright.operators.base import StepOperator


class StoreOperator(StepOperator):
    """Put the model (safetensors, source, signature) into the run folder and seal all of it with a manifest of sha256 sums.

    The manifest is written once, last; then everything is read back and verified. With outlets
    `trainwright.operators.assets.MODELS` or `model_asset(job)` each model is an event, its run and metrics the extra.

    | input | default | meaning |
    |---|---|---|
    | those of `StepOperator` | | |

    Returns `{"run", "artefact", "files", "bytes", "verified"}`.

    | failure | what Airflow does |
    |---|---|
    | no whole checkpoint, or an artefact that was changed | fails at once, no retry |
    | a service out of reach, the run held by another, killed | fails; retried as `retries` say |
    """

    step = "store"

    def work(self, context: Context) -> dict[str, Any]:
        """Store and seal; tell whoever follows the job's models."""
        from trainwright.tasks.promote import model_metrics

        reference = super().work(context)
        if self.outlets:
            run = self.opened.run
            extra = {"run": run.uri, "metrics": model_metrics(run)}
            announce(context, self.outlets, model_asset(run.job_name), extra)
        return reference
