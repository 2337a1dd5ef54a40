"""`ExtractOperator`: read a model's structure from its code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from airflow.sdk import Context

from trainwright.operators.base import StepOperator


class ExtractOperator(StepOperator):
    """Trace a training step with fake tensors: operations, FLOPs, bytes, memory, parameters.

    No memory is allocated for the model. In a chain, pass `run` or `job` (see `StepOperator`).
    Alone, pass `model`: it then needs no store and returns the structure's summary.

    | input | default | meaning |
    |---|---|---|
    | those of `StepOperator` | | |
    | `model` *(templated)* | none | a model source: a file, or `{"source": …, "config": {…}}` |
    | `batch_size` *(templated)* | 32 | with `model`: samples in the traced step |

    Returns `{"run", "artefact", "parameters", "forward_flops_per_sample", "operations"}`.

    | failure | what Airflow does |
    |---|---|
    | a model that cannot be built or traced, bad input | fails without a retry |
    | unreachable service, another process holds the run, killed | retries |
    """

    step = "extract"
    template_fields: Sequence[str] = (*StepOperator.template_fields, "model", "batch_size")

    def __init__(
        self,
        *,
        model: dict[str, Any] | str | None = None,
        batch_size: int | str = 32,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.model = model
        self.batch_size = batch_size

    def work(self, context: Context) -> dict[str, Any]:
        """Trace the run's model, or `model`."""
        from trainwright.tasks.extract import extract_model
        from trainwright.tasks.spec.documents import whole_number

        if self.model is None:
            return super().work(context)
        structure = extract_model(
            self.model, self.settings(), batch_size=whole_number("batch_size", self.batch_size)
        )
        return structure.model_dump(
            mode="json", exclude={"trace", "layers"}
        )  # an XCom must be small
