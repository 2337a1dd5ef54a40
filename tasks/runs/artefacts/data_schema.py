"""The data as a model sees it, and vocabulary.json: what its codes stand for."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from trainwright.tasks.runs.artefacts.artefact import Artefact
from trainwright.tasks.runs.value import Value
from trainwright.tasks.spec.data_spec import Task


class Column(Value):
    """A column of the data that a model gets, or an input made of several of them."""

    name: str = Field(description="as in the table")
    kind: Literal["number", "category", "text", "image", "time", "series"] = Field(
        description="what the column holds"
    )
    missing: int = Field(default=0, description="rows without a value")
    offset: int = Field(
        default=0,
        description="of numbers that float32 can't tell apart: the model gets their distance from "
        "this number, which is subtracted in 64 bits",
    )
    vocabulary: int = Field(
        default=0,
        description="codes of a category, an upper bound for every split: 0 stands for missing and "
        "unknown values; 0 for columns without codes",
    )


class TimeStamps(Value):
    """The time stamps of series. Their step is one of microseconds or of calendar months."""

    zone: str | None = Field(default=None, description="time zone of the stamps; None: none")
    step_us: int = Field(default=0, description="step in microseconds; None: it is in months")
    step_months: int = Field(default=0, description="step in months; None: it is in time")


class NumberForm(Value):
    """How the numbers of a .csv file's column are written."""

    decimal: str = Field(default=".", description="decimal mark")
    thousands: str = Field(default="", description="mark between thousands; empty: none")
    affix: str = Field(default="", description="sign of percent or of a currency, left out")


class CsvForm(Value):
    """How a .csv file was read."""

    separator: str = Field(default=",", description="character between columns")
    encoding: str = Field(default="utf-8", description="of the file's texts")
    skipped: int = Field(default=0, description="lines before the columns' names, such as sep=;")
    numbers: dict[str, NumberForm] = Field(
        default_factory=dict, description="columns of numbers that are not plain, such as 1,5"
    )
    texts: list[str] = Field(
        default_factory=list, description="columns of digits that are codes, such as 00145"
    )


class DataSchema(Value):
    """The data as a model sees it. Shapes are of one sample, without the batch dimension."""

    task: Task = Field(description="the kind of learning task, given or inferred")
    rows: int = Field(description="of the data")
    train_rows: int = Field(description="rows or windows to train on")
    validation_rows: int = Field(description="rows or windows that are held out")
    inputs: dict[str, tuple[int, ...]] = Field(
        description="shape by input; a single input is called `inputs`"
    )
    input_dtypes: dict[str, str] = Field(description="type of each input")
    nesting: Any = Field(
        default=None,
        description="names of inputs in the tuples (lists here) and dicts in which the model gets "
        "them; null: a single input alone, several as a dict",
    )
    target: str = Field(description="name of the target")
    target_dtype: str = Field(description="type of the target")
    target_shape: tuple[int, ...] = Field(
        default=(), description="(): one class or number a sample; (24,): 24 numbers"
    )
    classes: list[str] | None = Field(
        default=None, description="labels in the order of their numbers"
    )
    dropped: list[str] = Field(
        default_factory=list,
        description="columns without a value or a name (''); the model does not get them",
    )
    index: list[str] = Field(
        default_factory=list,
        description="columns that pandas wrote as a table's index; the model does not get them",
    )
    dates: dict[str, list[str]] = Field(
        default_factory=dict, description="by column of dates: the number columns made of it"
    )
    sha256: str = Field(description="digest of the content; a change of the data changes it")
    columns: list[Column] = Field(
        default_factory=list, description="the columns of the inputs, in their order"
    )
    stamps: TimeStamps | None = Field(default=None, description="of time series")
    csv: CsvForm | None = Field(default=None, description="of a .csv file: how it was read")
    notes: list[str] = Field(
        default_factory=list,
        description="how the source was read, if its values or axes could be read in another way",
    )


class Vocabulary(Artefact):
    """vocabulary.json: what the codes of a table with categories stand for."""

    FILE: ClassVar[str] = "vocabulary.json"
    names: dict[str, list[str]] = Field(
        description="by category column: the values of codes 1, 2, … in the training part; and the "
        "classes under the target's name"
    )
