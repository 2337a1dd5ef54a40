"""Models of the requests. A request for a plan is the content of a job file, with values in place
of the files that the service can't read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Annotated, Any

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from trainwright.estimator.predict.calibration import Calibration
from trainwright.estimator.structure import PRECISIONS, Precision, Structure
from trainwright.estimator.trace.source import BatchSpec
from trainwright.tasks.runs.artefacts.data_schema import DataSchema
from trainwright.tasks.spec.data_spec import Task
from trainwright.tasks.spec.documents import Document
from trainwright.tasks.spec.eligibility import MOST_BATCH
from trainwright.tasks.spec.job import Job, ModelSpec
from trainwright.tasks.spec.pool import Pool
from trainwright.tasks.spec.train_spec import Optimizer, TrainSpec

MAX_BATCH = MOST_BATCH
MAX_DEVICES = 10_000
MAX_LAYERS, MAX_UNITS = 5_000, 2_000
MAX_OPERATIONS, MAX_EVENTS = 20_000, 200_000
"""of a structure: operations, and storages that are made or freed"""
MAX_ROWS = 10**12
MAX_SIZE = 10**8
"""of one dimension of a sample, and of the number of classes"""


class SentModel(ModelSpec):
    """A model's source: a file in a served folder, or the text of its modules in `files`."""

    files: dict[str, str] | None = Field(
        default=None,
        max_length=200,
        description="Python modules by relative path; `source` is one of them",
    )

    @model_validator(mode="after")
    def _entry_is_there(self) -> SentModel:
        if self.files is None:
            return self
        for name in self.files:
            path = PurePosixPath(name)
            if (
                path.is_absolute()
                or ".." in path.parts
                or path.suffix != ".py"
                or len(name) > 200
                or not name.isprintable()
            ):
                raise ValueError(f"files with relative paths that end in .py, not {name[:80]!r}")
        if self.source not in self.files:
            raise ValueError(f"source as one of the files, not {self.source[:80]!r}")
        return self


class SentStructure(Structure):
    """structure.json, as `POST /structures` answers it, with checked numbers."""

    @model_validator(mode="after")
    def _sane(self) -> SentStructure:
        if self.precision not in PRECISIONS:
            raise ValueError(f"a precision of {', '.join(PRECISIONS)}, not {self.precision[:80]!r}")
        if not 1 <= self.batch_size <= MAX_BATCH:
            raise ValueError(f"a batch_size of 1 to {MAX_BATCH}, not {self.batch_size}")
        if min(self.parameters, self.parameter_bytes, self.accumulation) < 0:
            raise ValueError("counts of zero or more")
        lives = self.lifetimes
        for name, count, most in (
            ("layers", len(self.layer_work), MAX_LAYERS),
            ("units", len(self.units), MAX_UNITS),
            ("operations", len(self.trace), MAX_OPERATIONS),
            ("events", 0 if lives is None else len(lives.start) + len(lives.step), MAX_EVENTS),
        ):
            if count > most:
                raise ValueError(f"{most} {name} at most, not {count}")
        return self


class SentPool(Pool):
    """A pool file's content, with a limited number of devices."""

    @model_validator(mode="after")
    def _not_too_many(self) -> SentPool:
        if sum(entry.count for host in self.hosts for entry in host.devices) > MAX_DEVICES:
            raise ValueError(f"{MAX_DEVICES} devices at most")
        return self


def _shapes(inputs: Mapping[str, Sequence[int]], dtypes: Mapping[str, str]) -> None:
    """Raise ValueError if shapes or types of inputs are impossible."""
    for name, shape in inputs.items():
        if not all(1 <= size <= MAX_SIZE for size in shape):
            raise ValueError(
                f"inputs with sizes of 1 to {MAX_SIZE}, {name[:80]!r} has {str(list(shape))[:80]}"
            )
        if name not in dtypes:
            raise ValueError(f"input_dtypes of all inputs, {name[:80]!r} has none")
    for kind in dtypes.values():
        if re.fullmatch("float(16|32|64)|u?int(8|16|32|64)|bool", kind) is None:
            raise ValueError(f"input_dtypes such as float32 or int64, not {kind[:80]!r}")


class SentSpec(BatchSpec):
    """The shape of a sample, with checked numbers."""

    classes: Annotated[int, Field(ge=1, le=MAX_SIZE)] | None = None
    task: Task = "custom"

    @model_validator(mode="after")
    def _sane(self) -> SentSpec:
        shapes = {**self.inputs, "": self.target_shape}
        _shapes(shapes, {**self.input_dtypes, "": self.target_dtype})
        return self


class SentSchema(DataSchema):
    """`data` of validation.json, with checked numbers."""

    rows: Annotated[int, Field(ge=2, le=MAX_ROWS)]
    train_rows: Annotated[int, Field(ge=1, le=MAX_ROWS)]
    validation_rows: Annotated[int, Field(ge=0, le=MAX_ROWS)]

    @model_validator(mode="after")
    def _sane(self) -> SentSchema:
        _shapes(self.inputs, self.input_dtypes)
        return self


NameOrPool = Annotated[
    Annotated[str, Tag("tagged-name")] | Annotated[SentPool, Tag("tagged-pool")],
    Discriminator(lambda value: "tagged-name" if isinstance(value, str) else "tagged-pool"),
]
BatchSize = Annotated[int, Field(ge=1, le=MAX_BATCH, description="samples in a step")]
SentOptimizer = Annotated[
    Optimizer,
    BeforeValidator(lambda value: {"name": value} if isinstance(value, str) else value),
    Field(description="its name, or as `train.optimizer` of a job"),
]


_CALIBRATIONS: list[Calibration] = Field(
    default_factory=list,
    max_length=100,
    description="of device types: outputs of `trainwright calibrate`, used before others",
)


class StructureRequest(Document):
    """The input of `trainwright extract`."""

    model: SentModel = Field(description="the model to trace")
    batch_size: BatchSize = 32
    optimizer: SentOptimizer = Optimizer()
    precision: Precision = Field(default="fp32", description="as `train.precision` of a job")
    accumulation: Annotated[int, Field(ge=1, le=MAX_BATCH)] = Field(
        default=1, description="micro-batches in a step"
    )
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0, description="as `train.label_smoothing` of a job"
    )
    spec: SentSpec | None = Field(
        default=None, description="the shape of a sample, for a model without example_batch"
    )


def agree(structure: Structure | None, asked: EstimateRequest | TrainSpec) -> None:
    """Raise ValueError if optimizer or precision is given and the structure has another."""
    if structure is None:
        return
    if "optimizer" in asked.model_fields_set and asked.optimizer.name != structure.optimizer:
        raise ValueError(
            f"the structure's optimizer, {structure.optimizer[:80]}, or none; "
            f"not {asked.optimizer.name}"
        )
    if "precision" in asked.model_fields_set and asked.precision != structure.precision:
        raise ValueError(
            f"the structure's precision, {structure.precision}, or none; not {asked.precision}"
        )


class EstimateRequest(Document):
    """The input of `trainwright estimate`: a structure, or a model to trace first."""

    structure: SentStructure | None = Field(
        default=None, description="the model's structure: the answer of POST /structures"
    )
    model: SentModel | None = Field(
        default=None, description="instead of a structure; needs the right to start runs"
    )
    batch_size: BatchSize
    device_type: str | None = Field(
        default=None, description="a known device type; default: the calibration's"
    )
    calibration: Calibration | None = Field(
        default=None, description="the output of `trainwright calibrate`"
    )
    optimizer: SentOptimizer = Optimizer()
    precision: Precision = Field(default="fp32", description="as `train.precision` of a job")

    @model_validator(mode="after")
    def _complete(self) -> EstimateRequest:
        if (self.structure is None) == (self.model is None):
            raise ValueError("either a structure or a model")
        if self.calibration is None and self.device_type is None:
            raise ValueError("a calibration or a device_type")
        agree(self.structure, self)
        return self


class PlanRequest(Job):
    """A job file's content. With `structure` and `data_schema` or `rows`, no file is read."""

    pool: NameOrPool | None = Field(  # type: ignore[assignment]  # wider than the file's
        default=None,
        description="its name, file or content; default: the server's machine",
    )
    model: SentModel | None = Field(default=None, description="the model's source")
    structure: SentStructure | None = Field(
        default=None, description="the model's structure, instead of its source"
    )
    data_schema: SentSchema | None = Field(
        default=None, description="`data` of validation.json, instead of reading the data"
    )
    rows: int | None = Field(
        default=None,
        ge=2,
        le=MAX_ROWS,
        description="with a structure: number of rows, instead of the schema",
    )
    run: str | None = Field(
        default=None,
        max_length=100,
        description="`job/id` of a run, instead of model, structure and schema: its model, data "
        "and estimate; its pool too, if `pool` is left out (null: the server's machine)",
    )
    calibrations: list[Calibration] = _CALIBRATIONS

    @model_validator(mode="after")
    def _complete(self) -> PlanRequest:
        if sum(one is not None for one in (self.structure, self.model, self.run)) != 1:
            raise ValueError("either a structure, a model or a run")
        if self.run is not None and self.data_schema is not None:
            raise ValueError("a run without a data_schema")
        if self.rows is not None and (self.structure is None or self.data_schema is not None):
            raise ValueError("rows only with a structure, and without a data_schema")
        agree(self.structure, self.train)
        return self

    def job(self) -> dict[str, Any]:
        """The fields of the job file, without model and pool."""
        return self.model_dump(mode="json", include=set(Job.model_fields) - {"pool", "model"})


class RecommendRequest(Job):
    """A job file's content without a model."""

    pool: NameOrPool | None = Field(  # type: ignore[assignment]  # wider than the file's
        default=None,
        description="its name, file or content; default: the server's machine",
    )
    model: None = Field(default=None, description="left out: it is what is asked for")
    calibrations: list[Calibration] = _CALIBRATIONS

    @model_validator(mode="after")
    def _trains_nothing(self) -> RecommendRequest:
        if self.recommend.probe == "always":
            raise ValueError("recommend.probe: never; only a run or the command line trains")
        return self

    def job(self) -> dict[str, Any]:
        """The fields of the job file, without pool."""
        return self.model_dump(mode="json", include=set(Job.model_fields) - {"pool"})
