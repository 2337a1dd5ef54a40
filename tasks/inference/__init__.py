"""Predicts with the stored model of a finished run.

Start with `predict_rows`. `stored_model` verifies and unpacks the model, `row_source` reads rows,
`model_input` checks them and makes the model's arrays, `series_rows` checks those of time series,
`model_process` runs the model in the sandbox, `prediction_file` writes the result; `arrow_arrays`
makes Arrow arrays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainwright.tasks.lazy import exports

if TYPE_CHECKING:
    from trainwright.tasks.inference.predict_rows import predict

__all__ = ["predict"]

__getattr__ = exports(
    __name__,
    {
        "predict": "predict_rows",
    },
)
