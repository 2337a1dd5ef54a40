"""`StoreOperator`: store the model and seal the run."""

from __future__ import annotations

from typing import Any

from airflow.sdk import Context

from trainwright.operators.assets import announce, model_asset
from trainwright.operators.base import StepOperator


class StoreOperator(StepOperator):
    """Store the model (safetensors, source, signature) and seal the run by a manifest of digests.

    The manifest (size and sha256 of each file) is written once, last; then everything is read
    back and verified. With the outlet `trainwright.operators.assets.MODELS` or
    `model_asset(job)`, each model is an event with run and metrics in its extra.

    | input | default | meaning |
    |---|---|---|
    | those of `StepOperator` | | |

    Returns `{"run", "artefact", "files", "bytes", "verified"}`.

    | failure | what Airflow does |
    |---|---|
    | no complete checkpoint, a changed artefact | fails without a retry |
    | unreachable service, another process holds the run, killed | retries |
    """

    step = "store"

    def work(self, context: Context) -> dict[str, Any]:
        """Store and seal; announce the model on the task's outlets."""
        from trainwright.tasks.promote import model_metrics

        reference = super().work(context)
        if self.outlets:
            run = self.opened.run
            extra = {"run": run.uri, "metrics": model_metrics(run)}
            announce(context, self.outlets, model_asset(run.job_name), extra)
        return reference
