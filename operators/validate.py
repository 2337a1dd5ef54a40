"""Validate data before anything is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from airflow.sdk import Context

from trainwright.operators.base import StepOperator


class ValidateOperator(StepOperator):
    """Check data against its expectations with Great Expectations; fail, naming them, where it does not meet them.

    Within a chain it takes `run` or `job` (see `StepOperator`). Alone, as a gate before anybody's task, it takes `data` and
    needs no store.

    | input | default | meaning |
    |---|---|---|
    | those of `StepOperator` | | |
    | `data` *(templated)* | none | the data alone, as in a job file: `{"uri": …, "target": …, "expectations": …}` |

    Returns `{"run", "artefact", "success", "expectations", "rows", "suite"}`.

    | failure | what Airflow does |
    |---|---|
    | data that does not meet its expectations, bad input | fails at once, no retry |
    | a service out of reach, the run held by another, killed | fails; retried as `retries` say |
    """

    step = "validate"
    template_fields: Sequence[str] = (*StepOperator.template_fields, "data")

    def __init__(self, *, data: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.data = data

    def work(self, context: Context) -> dict[str, Any]:
        """Check the data of the run, or the data given."""
        from trainwright.tasks.validate.step import validate_data

        if self.data is None:
            return super().work(context)
        return validate_data(self.data, self.settings())
