"""The noise of the statistics of drift: what they are between random halves of the same rows.

The rows of a bin that fall into a random half of all rows follow the multivariate hypergeometric
distribution. So the profile is enough; the data need not be read again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainwright.tasks.runs.artefacts.data_profile import ColumnProfile, DataProfile, Statistic
from trainwright.tasks.validate.drift.effect_sizes import common_counts, count_statistics

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

DRAWS = 2_000
FALSE_ALARMS = 0.001
"""Share of random halves in which a statistic of some column may be above the noise."""
FEW_ROWS = 8
"""Added to the rows with nulls, and to those with a category beside the frequent ones: a column
that has few or none has some by chance in other rows."""
_MOST_ROWS = 100_000_000  # NumPy's sampler takes less than 10^9; with as many rows noise is nil


def with_noise(profile: DataProfile) -> DataProfile:
    """The profile with the noise of each statistic, and the factors for all columns together."""
    import numpy as np

    random = np.random.Generator(np.random.PCG64(0))
    columns = dict[str, ColumnProfile]()
    worst: dict[Statistic, Array] = {}
    for name, column in profile.columns.items():
        noise = dict[Statistic, float]()
        for statistic, values in _halves(column, random).items():
            noise[statistic] = float(np.quantile(values, 0.99))
            if noise[statistic] > 0:
                before = worst.get(statistic, np.ones(DRAWS))
                worst[statistic] = np.maximum(before, values / noise[statistic])
        columns[name] = column.model_copy(update={"noise": noise})
    factors = {
        statistic: float(np.quantile(values, 1 - FALSE_ALARMS))
        for statistic, values in worst.items()
    }
    return profile.model_copy(update={"columns": columns, "noise_factors": factors})


def _halves(column: ColumnProfile, random: np.random.Generator) -> dict[Statistic, Array]:
    """Each statistic between `DRAWS` pairs of random halves."""
    import numpy as np

    found: dict[Statistic, Array] = {}
    if column.rows >= 2:
        filled = np.array([column.present, column.nulls + FEW_ROWS])
        one, two = _split(filled, random)
        share = one[:, 1] / one.sum(axis=1) - two[:, 1] / two.sum(axis=1)
        found["null_share"] = np.abs(share)
    counts = common_counts(column, column)
    if counts is None or column.present < 2:
        return found
    ordered = column.numbers is not None
    rows = counts[0].astype(np.int64)
    if not ordered:
        rows[-1] += FEW_ROWS
    one, two = _split(rows, random)
    found |= count_statistics(one, two, ordered=ordered)
    if ordered:
        # The means' difference is normal, with a variance of 4 / rows in standard deviations.
        found["mean_shift"] = np.abs(random.standard_normal(DRAWS)) * 2 / column.present**0.5
    return found


def _split(counts: Array, random: np.random.Generator) -> tuple[Array, Array]:
    if counts.sum() > _MOST_ROWS:
        counts = counts * _MOST_ROWS // counts.sum()
    one = random.multivariate_hypergeometric(
        counts, counts.sum() // 2, size=DRAWS, method="marginals"
    )
    return one, counts - one
