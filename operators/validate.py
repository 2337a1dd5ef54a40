"""`ValidateOperator`: check data before a run allocates devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from airflow.sdk import Context

from trainwright.operators.base import StepOperator
from trainwright.operators.links import LINKS, RejectionLink
from trainwright.tasks.errors import DataRejected


class ValidateOperator(StepOperator):
    """Check data with Great Expectations; fail with the expectations that it does not meet.

    In a chain, pass `run` or `job` (see `StepOperator`). Alone, as a gate before any task, pass
    `data`: it then needs no store.

    | input | default | meaning |
    |---|---|---|
    | those of `StepOperator` | | |
    | `data` *(templated)* | none | as in a job file: `{"uri": …, "target": …, "expectations": …}` |

    The link "Rejected data" of a task that rejected its run's data opens the page that says why.

    Returns `{"run", "artefact", "success", "expectations", "rows", "suite", "drift"}`.

    | failure | what Airflow does |
    |---|---|
    | data that fails an expectation or drifted (`drift: fail`), bad input | fails without a retry |
    | unreachable service, another process holds the run, killed | retries |
    """

    step = "validate"
    function_returns = "data"
    template_fields: Sequence[str] = (*StepOperator.template_fields, "data")
    operator_extra_links = (*LINKS, RejectionLink())
    rejected = False
    """Whether the run's data was rejected, so that there is a page on it."""

    def __init__(self, *, data: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.data = data

    def work(self, context: Context) -> dict[str, Any]:
        """Check the run's data, or `data`."""
        from trainwright.tasks.validate.step import validate_data

        if self.data is None:
            try:
                return super().work(context)
            except DataRejected:
                self.rejected = True
                raise
        return validate_data(self.data, self.settings())
