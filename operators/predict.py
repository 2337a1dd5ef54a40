"""`PredictOperator`: predict rows with the stored model of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from airflow.sdk import Context

from trainwright.operators.base import StepOperator, given


class PredictOperator(StepOperator):
    """Predict rows with a finished run's stored model, and write the predictions.

    The model's code runs in the sandbox. Rows are read and written in chunks; the output appears
    whole or not at all. A retry writes it again.

    | input | default | meaning |
    |---|---|---|
    | `run` *(templated)* | required | the reference that `store` returned, or a run's URI |
    | `rows` *(templated)* | required | a file or folder, as for `trainwright predict` |
    | `out` *(templated)* | required | .parquet or .csv: a path, file://… or s3://… |
    | `allow_unseen` | False | also columns of categories without any value of the training part |
    | those of `StepOperator` | | |

    Columns are found by name. The target may be missing; other columns are ignored.

    Returns `{"run", "model_step", "task", "input", "out", "rows", "columns", "ignored", "unseen",
    "duration_s"}`; `unseen` counts, by column, rows with a value that the training part lacks.

    | failure | what Airflow does |
    |---|---|
    | an unfinished or damaged run, rows that do not fit, bad input | fails without a retry |
    | unreachable store, killed | retries |
    """

    step = "predict"
    template_fields: Sequence[str] = (*StepOperator.template_fields, "rows", "out")

    def __init__(
        self,
        *,
        rows: str | None = None,
        out: str | None = None,
        allow_unseen: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.allow_unseen = allow_unseen
        self.rows = rows
        self.out = out

    def work(self, context: Context) -> dict[str, Any]:
        """Predict, and describe the output."""
        from trainwright.tasks.errors import BadInput
        from trainwright.tasks.inference.predict_rows import predict
        from trainwright.tasks.units import counted

        if self.reference() is None:
            raise BadInput(f"{self.task_id}: pass `run`, a finished run")
        rows, out = given(self.rows), given(self.out)
        if rows is None or out is None:
            raise BadInput(f"{self.task_id}: pass `rows` and `out`")
        run = self.open(context).run
        found = predict(run, rows, out, allow_unseen=self.allow_unseen)
        self.log.info("%s predicted: %s", counted(found.rows, "row"), found.out)
        return found.model_dump(mode="json")
