"""`EstimateOperator`: predict the cost of a training step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from airflow.sdk import Context

from trainwright.operators.base import StepOperator


class EstimateOperator(StepOperator):
    """Predict step time, memory and energy, with intervals, on every kind of device of the pool.

    In a chain, pass `run` or `job` (see `StepOperator`). Alone, pass `model`: it then needs no
    store and returns one prediction per device type.

    | input | default | meaning |
    |---|---|---|
    | those of `StepOperator` | | |
    | `model` *(templated)* | none | a model source: a file, or `{"source": …, "config": {…}}` |
    | `device_types` *(templated)* | cpu | with `model`: the device types to predict for |
    | `batch_size` *(templated)* | 32 | with `model`: samples per step |

    Returns `{"run", "artefact", "mode", "device_kinds", "learned_from"}`.

    | failure | what Airflow does |
    |---|---|
    | a model that cannot be built or traced, an unknown device type | fails without a retry |
    | unreachable service, another process holds the run, killed | retries |
    """

    step = "estimate"
    template_fields: Sequence[str] = (
        *StepOperator.template_fields,
        "model",
        "device_types",
        "batch_size",
    )

    def __init__(
        self,
        *,
        model: dict[str, Any] | str | None = None,
        device_types: Sequence[str] = ("cpu",),
        batch_size: int | str = 32,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.model = model
        self.device_types = device_types
        self.batch_size = batch_size

    def work(self, context: Context) -> dict[str, Any]:
        """Predict for the run's pool, or for `model` on `device_types`."""
        from trainwright.tasks.estimate.step import estimate_step
        from trainwright.tasks.extract import extract_model
        from trainwright.tasks.spec.documents import texts, whole_number

        if self.model is None:
            return super().work(context)
        batch_size = whole_number("batch_size", self.batch_size)
        settings = self.settings()
        structure = extract_model(self.model, settings, batch_size=batch_size)
        return {
            name: estimate_step(structure, settings, batch_size=batch_size, device_type=name)
            for name in texts("device_types", self.device_types)
        }
