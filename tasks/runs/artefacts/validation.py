"""validation.json: whether the data meets the expectations, its schema and its profile."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from trainwright.tasks.runs.artefacts.artefact import Artefact
from trainwright.tasks.runs.artefacts.data_profile import DataProfile, Drift
from trainwright.tasks.runs.artefacts.data_schema import DataSchema
from trainwright.tasks.runs.value import Value

REJECTION = "rejection.html"
"""The page of a run whose data was rejected."""


class Expectation(Value):
    """One expectation and whether the data meets it."""

    expectation: str = Field(description="Great Expectations' name")
    column: str | None = Field(default=None, description="that it is about, if it is one")
    expected: dict[str, Any] = Field(default_factory=dict, description="its arguments")
    success: bool = Field(description="whether it is met")
    observed: Any = Field(default=None, description="what the data has")
    unexpected_count: int | None = Field(default=None, description="rows that do not meet it")
    sample_rows: list[dict[str, Any]] = Field(
        default_factory=list, description="failing rows, with their index"
    )


class DataWarning(Value):
    """Something in the data that may be a mistake; it never rejects the data."""

    kind: Literal["leakage", "duplicates", "label_noise", "identifier"] = Field(
        description="leakage, duplicates, label_noise or identifier"
    )
    column: str | None = Field(default=None, description="that it is about, if it is one")
    message: str = Field(description="for people, with row numbers")
    rows: list[int] = Field(default_factory=list, description="the first row numbers")
    count: int | None = Field(
        default=None, description="number of rows in all; None: of an earlier release"
    )


class Validation(Artefact):
    """validation.json"""

    FILE: ClassVar[str] = "validation.json"
    success: bool = Field(description="whether the data meets all expectations")
    suite_source: Literal["given", "kept", "inferred", "none"] = Field(
        description="none: the model's source reads the data, and nothing is checked"
    )
    suite: list[dict[str, Any]] = Field(
        description="the expectations, in Great Expectations' format"
    )
    suite_version: str | None = Field(
        default=None, description="sha256 of the suite; None: not checked, or an earlier release"
    )
    suite_profile: str | None = Field(
        default=None,
        description="sha256 of the profile that the suite was inferred from; None: not inferred, "
        "or edited since",
    )
    expectations: list[Expectation]
    data: DataSchema | None = Field(
        default=None, description="None if no arrays can be made of the data"
    )
    checked_rows: int = Field(description="rows that were checked")
    great_expectations: dict[str, Any] = Field(description="Great Expectations' own result")
    profile: DataProfile | None = Field(
        default=None, description="of the columns, for comparison with later data"
    )
    drift: Drift | None = Field(
        default=None, description="comparison with an earlier run's data; None: not compared"
    )
    warnings: list[DataWarning] = Field(
        default_factory=list,
        description="leakage, duplicates across the split, candidates for wrong labels",
    )

    @property
    def suite_words(self) -> str:
        """The suite for people, as in `kept, version 0123456789ab`."""
        words: str = self.suite_source
        if self.suite_version is not None:
            words += f", version {self.suite_version[:12]}"
        if self.suite_profile is not None:
            words += f", inferred from profile {self.suite_profile[:12]}"
        return words
