"""The profile of a data set, and its comparison with another: parts of validation.json.

`tasks.validate.drift.profile` makes the first, `tasks.validate.drift.compare_profiles` the second.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trainwright.tasks.runs.value import Value

Statistic = Literal[
    "psi",
    "js_distance",
    "cdf_gap",
    "mean_shift",
    "null_share",
    "share_shift",
    "new_share",
    "lost_share",
    "kind",
]


class Numbers(Value):
    """The finite numbers of a column, counted in bins that are the same for all data.

    A bin's key is the number's 64 bits as a whole number of the same order, without its last
    `shift` bits. Numbers with the same key are in one bin.
    """

    shift: int = Field(description="subtracted before the moments are computed")
    keys: list[int] = Field(description="of the bins that hold a number, rising")
    counts: list[int] = Field(description="values in each bin")
    mean: float = Field(description="of the values that are there")
    deviation: float = Field(description="standard deviation")


class Categories(Value):
    """The most frequent values of a column, as text, with their counts."""

    counts: dict[str, int] = Field(description="rows of each value")
    rest: int = Field(default=0, description="rows with any other value")


class ColumnProfile(Value):
    """A column; `numbers` and `categories` are both None for other kinds of values."""

    rows: int = Field(description="rows that were profiled")
    nulls: int = Field(description="rows without a value, or with NaN or an infinite number")
    numbers: Numbers | None = None
    categories: Categories | None = None
    noise: dict[Statistic, float] = Field(
        default_factory=dict,
        description="99th percentile of each statistic between random halves of the rows",
    )

    @property
    def present(self) -> int:
        """The number of rows with a value."""
        return self.rows - self.nulls


class DataProfile(Value):
    """The columns of a data set, the target among them, by name."""

    rows: int = Field(description="rows that were profiled")
    target: str = Field(description="name of the target")
    columns: dict[str, ColumnProfile]
    noise_factors: dict[Statistic, float] = Field(
        default_factory=dict,
        description="by which `noise` is multiplied, so that between random halves a statistic is "
        "rarely above it in any column",
    )


class Histogram(Value):
    """Shares of the rows by bar: equally wide ones of numbers, or one for each category."""

    ordered: bool = Field(description="of numbers: the first and the last bar have labels")
    labels: list[str] = Field(description="of the bars")
    now: list[float] = Field(description="share of each bar in this data")
    reference: list[float] = Field(description="share of each bar in the reference")


class ColumnDrift(Value):
    """How much a column differs from the reference's, and what is allowed.

    `statistic` is the one that is largest relative to its threshold.
    """

    column: str = Field(description="its name, or the target's")
    drifted: bool = Field(description="whether a figure is above its threshold")
    statistic: Statistic = Field(description="the figure that exceeds its threshold most")
    value: float = Field(description="of that figure")
    threshold: float = Field(description="of that figure")
    values: dict[Statistic, float] = Field(description="all figures, by name")
    thresholds: dict[Statistic, float] = Field(description="of all figures, by name")
    new: list[str] = Field(default_factory=list, description="categories; the most frequent")
    lost: list[str] = Field(default_factory=list, description="categories; the most frequent")
    histogram: Histogram | None = Field(default=None, description="of a column that drifted")


class Drift(Value):
    """The comparison of a run's data with that of an earlier run."""

    reference: str | None = Field(description="URI of the run; None: nothing to compare with")
    rejected: bool = Field(default=False, description="whether the job's data.drift is `fail`")
    columns: list[ColumnDrift] = Field(default_factory=list, description="drifted ones first")

    @property
    def drifted(self) -> list[ColumnDrift]:
        """The columns that drifted, the farthest above its threshold first."""
        return [column for column in self.columns if column.drifted]
