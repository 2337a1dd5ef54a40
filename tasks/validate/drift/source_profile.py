"""The profile of a data source: a table's columns, or figures of images and arrays."""

# ruff: noqa: TID253 -- only loaded by tasks.validate.expectations, in a separate process

from __future__ import annotations

import pandas as pd
import pyarrow as pa

from trainwright.tasks.data.formats import Raw
from trainwright.tasks.runs.artefacts.data_profile import DataProfile
from trainwright.tasks.validate.drift.profile import BATCH_ROWS, profile
from trainwright.tasks.validate.drift.random_halves import with_noise


def source_profile(raw: Raw, frame: pd.DataFrame, target: str, task: str) -> DataProfile:
    """The profile of all rows of a table; of arrays and images, of each row's mean and target.

    `frame` is what the expectations check; it has the means. The profile includes the noise.
    """
    table = raw.table
    if not raw.is_table:
        columns = {name: pa.array(frame[name]) for name in frame if str(name).endswith("_mean")}
        if target in table.column_names:
            columns[target] = table.column(target)
        table = pa.table(columns)
    batches = table.to_batches(max_chunksize=BATCH_ROWS)
    return with_noise(profile(batches, target, classes=task.endswith("classification")))
