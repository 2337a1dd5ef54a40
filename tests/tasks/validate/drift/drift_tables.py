"""Tables with known differences, and their profiles."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from trainwright.tasks.runs.artefacts.data_profile import ColumnDrift, DataProfile
from trainwright.tasks.validate.drift.compare_profiles import compare
from trainwright.tasks.validate.drift.profile import profile
from trainwright.tasks.validate.drift.random_halves import with_noise

SHARES = np.array([0.01, 0.02, 0.07, 0.1, 0.2, 0.25, 0.35])


def table(random: np.random.Generator, rows: int) -> pa.Table:
    """Numbers of several distributions, categories, nulls, and a target with seven classes."""
    return pa.table(
        {
            "normal": random.normal(size=rows),
            "skewed": random.lognormal(size=rows),
            "far": 1.7e9 + random.random(rows),
            "whole": random.poisson(3, rows),
            "flag": random.random(rows) < 0.3,
            "colour": np.array(list("abcdefg"))[random.choice(7, rows, p=SHARES)],
            "holes": pa.array(random.normal(size=rows), mask=random.random(rows) < 0.03),
            "label": random.choice(7, rows, p=SHARES),
        }
    )


def profiled(given: pa.Table, rows: int = 65_536) -> DataProfile:
    """The profile with its noise."""
    return with_noise(plain(given, rows))


def plain(given: pa.Table, rows: int = 65_536) -> DataProfile:
    """The profile without noise, which only a reference needs."""
    return profile(given.to_batches(max_chunksize=rows), "label", classes=True)


def replaced(given: pa.Table, name: str, values: Any) -> pa.Table:
    """The table with other values in a column."""
    return given.set_column(given.column_names.index(name), name, pa.array(values))


def drifted(one: DataProfile, reference: DataProfile) -> dict[str, ColumnDrift]:
    """The drifted columns by name."""
    return {found.column: found for found in compare(one, reference) if found.drifted}
