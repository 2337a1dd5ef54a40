"""The part `data` of a job: where the data is, what of it is predicted, what is held out."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from trainwright.tasks.spec.csv_spec import CsvSpec
from trainwright.tasks.spec.documents import Document

Task = Literal[
    "image-classification",
    "tabular-classification",
    "tabular-regression",
    "text-classification",
    "forecasting",
    "custom",
]
Channels = Literal["auto", "first", "last"]
Fraction = Annotated[float, Field(gt=0, lt=1)]
Side = Annotated[int, Field(ge=1, le=4096)]


class DataSpec(Document):
    """The data of a job."""

    uri: str = Field(
        min_length=1,
        description="builtin:NAME, s3://…, file://… or a path: parquet, csv, npy, npz, a folder of "
        "parquet files or of images",
    )
    target: str = Field(default="label", min_length=1, description="the column or array to predict")
    task: Task | None = Field(
        default=None, description="the kind of learning task; default: inferred from the data"
    )
    validation_fraction: Fraction = Field(
        default=0.2, description="share of rows held out for validation"
    )
    split: Literal["rows", "time", "group"] = Field(
        default="rows",
        description="what is held out: random rows, the latest rows, or random whole groups",
    )
    split_by: str | None = Field(
        default=None,
        min_length=1,
        description="for split: time or group: the column with the time or the group of a row; it "
        "is no input of the model",
    )
    stratify: Literal["auto", "true", "false"] = Field(
        default="auto",
        description="true: each class has the same share of random validation rows; auto: only so "
        "that both parts have every class with at least two rows; false: by chance",
    )
    missing: Literal["auto", "refuse", "keep"] = Field(
        default="auto",
        description="missing values of a table's inputs: refused, or kept as NaN and code 0; auto: "
        "refused if the job names a model, else kept; with reader: model, keep permits NaN",
    )
    ignore: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(),
        description="columns of a table that are no inputs of the model, such as identifiers",
    )
    text: str | None = Field(
        default=None,
        min_length=1,
        description="the column of texts that is a table's only input; default: the only column "
        "besides the target, if it holds long texts",
    )
    csv: CsvSpec = Field(default_factory=CsvSpec, description="the form of a .csv file")
    time: str | None = Field(
        default=None,
        min_length=1,
        description="the column of time stamps of a table whose target is to be forecast",
    )
    series: str | None = Field(
        default=None,
        min_length=1,
        description="with time: the column that says to which series a row belongs; default: all "
        "rows are one series",
    )
    horizon: int | None = Field(
        default=None,
        ge=1,
        le=100_000,
        description="with time: how many steps to forecast; default: one season",
    )
    history: int | None = Field(
        default=None,
        ge=1,
        le=100_000,
        description="with time: how many past steps a forecast gets; default: 2 to 7 seasons",
    )
    image_size: tuple[Side, Side] | None = Field(
        default=None,
        description="[height, width] of a folder's images; default, or auto: their own, or if they "
        "differ, their median, at most 224 × 224",
    )
    channels: Channels = Field(
        default="auto",
        description="where the channels of an npz file's images are: rows × channels × height × "
        "width, or rows × height × width × channels; auto: last if that axis has at most 4 "
        "entries and the others more, and the numbers are unsigned, or it has 3, or the image is "
        "square",
    )
    augment: Literal["auto", "none", "flip", "crop", "flip-crop"] = Field(
        default="auto",
        description="random changes of training images: flip mirrors them left to right, crop "
        "shifts them by up to an eighth; auto: none, because the data does not tell whether a "
        "changed image is of the same class",
    )
    reader: Literal["trainwright", "model"] = Field(
        default="trainwright",
        description="who reads the data; model: the function dataset(uri, part, **config) of the "
        "model's source, and no suite checks the data",
    )
    expectations: str | None = Field(
        default=None,
        description="a Great Expectations suite (JSON); default: inferred from the data",
    )
    drift: Literal["warn", "fail", "off"] = Field(
        default="warn", description="what to do if the data differs from the reference's"
    )
    reference: str | None = Field(
        default=None,
        min_length=1,
        description="a run whose data is the reference for drift, as JOB/ID or URI, or an inferred "
        "suite with the profile of its data, as JOB/VERSION or URI; default: the job's promoted "
        "run, else its last successful one",
    )

    @property
    def named_columns(self) -> list[str]:
        """The columns of a table that fields of the job name."""
        fields = (self.target, self.split_by, self.text, self.time, self.series)
        return [*(name for name in fields if name is not None), *self.ignore]

    @field_validator("stratify", mode="before")
    @classmethod
    def _yaml_has_true_and_false(cls, value: Any) -> Any:
        return str(value).lower() if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _what_is_used_is_not_ignored(self) -> DataSpec:
        if twice := [name for name in (self.target, self.text, self.time) if name in self.ignore]:
            raise ValueError(f"ignore: columns that no other field names; {twice[0]!r} is named")
        return self

    @model_validator(mode="after")
    def _split_has_its_column(self) -> DataSpec:
        if (self.split == "rows") != (self.split_by is None):
            raise ValueError("split_by with split: time or split: group, and only with these")
        return self

    @field_validator("image_size", mode="before")
    @classmethod
    def _own_size(cls, size: Any) -> Any:
        return None if size == "auto" else size

    @model_validator(mode="after")
    def _series_have_stamps(self) -> DataSpec:
        for field in ("series", "horizon", "history"):
            if self.time is None and getattr(self, field) is not None:
                raise ValueError(f"{field} only with time, the column of time stamps")
        if self.time is not None and self.text is not None:
            raise ValueError("time or text, not both")
        return self
