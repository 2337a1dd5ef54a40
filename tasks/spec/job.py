"""The job file: which data, which model, how to train, by when.

The same class defines the file, the REST body and the form. Paths in a job file are relative to
the file; `load_job` makes them absolute. docs/guide.md shows examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from trainwright.tasks.errors import BadInput
from trainwright.tasks.spec.cron import Cron
from trainwright.tasks.spec.documents import (
    Document,
    Duration,
    Wait,
    kind_of,
    matching,
    parse_value,
    read_mapping,
    validated,
)
from trainwright.tasks.spec.metric_names import SHARES, Metric, metrics_of

Task = Literal[
    "image-classification",
    "tabular-classification",
    "tabular-regression",
    "text-classification",
    "forecasting",
    "custom",
]
Name = Annotated[
    str,
    matching(
        r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$",
        "1 to 63 lower-case letters, digits and -, not beginning or ending with -",
        description="lower-case letters, digits, -",
    ),
]
Fraction = Annotated[float, Field(gt=0, lt=1)]
Side = Annotated[int, Field(ge=1, le=4096)]
_MOST_STEPS = 1_000_000_000
Scalar = str | int | float | bool | None


class JobName(Document):
    """A job's name that a person gave."""

    name: Name


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
        "refused if the job names a model, else kept",
    )
    text: str | None = Field(
        default=None,
        min_length=1,
        description="the column of texts that is a table's only input; default: the only column "
        "besides the target, if it holds long texts",
    )
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
    augment: Literal["auto", "none", "flip", "crop", "flip-crop"] = Field(
        default="auto",
        description="random changes of training images: flip mirrors them left to right, crop "
        "shifts them by up to an eighth; auto: none",
    )
    reader: Literal["trainwright", "model"] = Field(
        default="trainwright",
        description="who reads the data; model: the function dataset(uri, part, **config) of the "
        "model's source, and the data is not checked",
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
        description="a run whose data is the reference for drift, as JOB/ID or URI; default: the "
        "job's promoted run, else its last successful one",
    )

    @field_validator("stratify", mode="before")
    @classmethod
    def _yaml_has_true_and_false(cls, value: Any) -> Any:
        return str(value).lower() if isinstance(value, bool) else value

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


class ModelSpec(Document):
    """The model of a job."""

    source: str = Field(
        min_length=1, description="path/to/model.py, or a module that defines build_model"
    )
    config: dict[str, Scalar | list[Scalar]] = Field(
        default_factory=dict, description="arguments of build_model"
    )


class Optimizer(Document):
    """The optimizer and its constants (torch.optim's names)."""

    name: Literal["sgd", "momentum", "adam", "adamw"] = Field(
        default="adamw", description="the update rule"
    )
    weight_decay: float = Field(
        default=0.0, ge=0, le=1e6, description="L2 penalty (decoupled in adamw)"
    )
    momentum: float = Field(default=0.9, ge=0, lt=1, description="for momentum only")
    betas: tuple[float, float] = Field(
        default=(0.9, 0.999),
        description="for adam and adamw: decay of the means of gradients and of their squares",
    )
    decay_exclude: Literal["none", "vectors"] = Field(
        default="none",
        description="parameters without weight decay; vectors: those of fewer than two "
        "dimensions, such as biases and the weights of norms",
    )

    @field_validator("betas")
    @classmethod
    def _decaying(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= one < 1 for one in betas):
            raise ValueError("two numbers from 0 to below 1, such as [0.9, 0.95]")
        return betas


class CheckpointPolicy(Document):
    """When checkpoints are written and which are kept."""

    every_steps: int = Field(
        default=50, ge=1, le=_MOST_STEPS, description="steps between checkpoints"
    )
    keep_last: int = Field(
        default=3, ge=1, le=_MOST_STEPS, description="how many of the newest are kept"
    )
    keep_best: bool = Field(
        default=True,
        description="also keep the one with the best validation metric, which becomes the stored "
        "model; false: the last one does",
    )
    keep_every: int | None = Field(
        default=None,
        ge=1,
        le=_MOST_STEPS,
        description="steps between checkpoints that are kept for good; a multiple of every_steps",
    )

    @model_validator(mode="after")
    def _kept_ones_are_written(self) -> CheckpointPolicy:
        if self.keep_every is not None and self.keep_every % self.every_steps:
            raise ValueError(
                f"keep_every as a multiple of every_steps ({self.every_steps}), "
                f"not {self.keep_every}"
            )
        return self


class FaultPolicy(Document):
    """How a training handles lost devices."""

    stall_timeout: Duration = Field(
        default=60.0,
        ge=1.0,
        description="a rank without a heartbeat, or in one step, for this long is restarted",
    )
    wait_for_devices: Wait = Field(
        default=60.0,
        description="how long to wait for devices to come back if fewer than devices.min_count "
        "are left",
    )
    restarts: int = Field(
        default=10,
        ge=0,
        description="how often a device's process is restarted without reaching a checkpoint",
    )


class Target(Document):
    """A metric that training should reach; reported, and used to choose the best checkpoint."""

    metric: Metric = Field(
        default="accuracy",
        description="measured on the validation rows; accuracy, f1, auc or log_loss of classes, "
        "rmse, mae or r2 of numbers, mase of forecasts, or the loss",
    )
    value: float = Field(
        description="the value to reach; for accuracy, f1 and auc a share: 0.97 for 97 %"
    )


class EarlyStopping(Document):
    """When training ends before its last epoch. Every epoch ends with an evaluation."""

    patience: int = Field(
        ge=1, le=100_000, description="evaluations in a row without a better metric"
    )
    metric: Metric | None = Field(
        default=None,
        description="measured on the validation rows; also chooses the best checkpoint; default: "
        "train.target's, else accuracy of classes, else the loss",
    )


class TrainSpec(Document):
    """How to train."""

    epochs: int = Field(default=5, ge=1, le=100_000, description="passes over the training rows")
    global_batch_size: int | Literal["auto"] = Field(
        default="auto", description="samples per step, over all devices"
    )
    batch_bounds: tuple[int, int] = Field(
        default=(64, 1024), description="smallest and largest global batch for auto"
    )
    noise_scale: float | None = Field(
        default=None,
        ge=1e-3,
        le=1e12,
        description="gradient noise scale in samples, if known: limits how large a batch pays off",
    )
    optimizer: Optimizer = Optimizer()
    learning_rate: float | Literal["auto"] = Field(
        default="auto", description="a number; auto: found by search_lr"
    )
    learning_rate_rule: Literal["auto", "constant", "linear", "sqrt", "adascale"] = Field(
        default="auto", description="how the rate follows a batch that grows while training"
    )
    schedule: Literal["constant", "cosine", "flat-cosine"] = Field(
        default="cosine",
        description="the learning rate's schedule over the run; flat-cosine: constant for the "
        "first half, then as cosine",
    )
    warm_up: float = Field(
        default=0.0,
        ge=0,
        le=0.5,
        description="share of the run in which the rate rises from a tenth; 0: none",
    )
    clip_norm: float | None = Field(default=None, gt=0, description="bound on the gradient's norm")
    label_smoothing: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="share of each label that is spread over all classes while training; for the "
        "task's own cross-entropy only; validation's loss is without it",
    )
    early_stopping: EarlyStopping | None = Field(
        default=None,
        description="end when a validation metric stops improving; the schedule stays that of all "
        "epochs",
    )
    precision: Literal["fp32", "fp64", "bf16", "amp"] = Field(
        default="fp32",
        description="precision of parameters and arithmetic; amp: parameters in fp32, arithmetic "
        "in half precision where that is safe",
    )
    seed: int = Field(
        default=0, ge=0, lt=2**31, description="seed of initial weights, data order and split"
    )
    backend: Literal["auto", "horovod", "torch"] = Field(
        default="auto", description="library for collectives; auto: Horovod if it is installed"
    )
    adaptive_split: bool = Field(
        default=True, description="correct the batch split by measured step times"
    )
    adaptive_batch: bool = Field(
        default=False, description="let the global batch grow within batch_bounds"
    )
    checkpoint: CheckpointPolicy = CheckpointPolicy()
    faults: FaultPolicy = FaultPolicy()
    target: Target | None = None

    @field_validator("batch_bounds", mode="before")
    @classmethod
    def _ordered(cls, bounds: Any) -> Any:
        """Check both bounds at once, so that one message states all of the rule."""
        given = list(bounds) if isinstance(bounds, list | tuple) else []
        whole = all(type(one) is int or (type(one) is float and one.is_integer()) for one in given)
        if len(given) != 2 or not whole or not 1 <= given[0] <= given[1]:
            raise PydanticCustomError(
                "bounds", "[least, greatest] with 1 <= least <= greatest, both whole numbers"
            )
        return bounds

    @model_validator(mode="after")
    def _grows_within_its_bounds(self) -> TrainSpec:
        size, most = self.global_batch_size, self.batch_bounds[1]
        if self.adaptive_batch and size != "auto" and size > most:
            raise ValueError(
                f"global_batch_size of at most {most}, the upper bound of batch_bounds, not {size}"
            )
        return self

    @field_validator("global_batch_size")
    @classmethod
    def _above_zero(cls, value: int | Literal["auto"]) -> int | Literal["auto"]:
        if value != "auto" and value <= 0:
            raise ValueError("more than zero, or auto")
        return value

    @field_validator("learning_rate")
    @classmethod
    def _finite_in_every_precision(cls, value: float | Literal["auto"]) -> float | Literal["auto"]:
        if value != "auto" and not 0 < value <= 1e6:
            raise ValueError("more than zero, up to 1000000, or auto")
        return value


class Objective(Document):
    """What the planner minimises, and the limits that it keeps."""

    minimize: Literal["energy", "cost", "time"] = Field(
        default="energy", description="the quantity to minimise"
    )
    deadline: Duration | None = Field(
        default=None, description="from the lease to the end of training, such as 30m"
    )
    budget: float | None = Field(
        default=None, ge=1e-9, le=1e12, description="highest cost, in the pool's currency"
    )
    confidence: Annotated[float, Field(ge=0.5, lt=1)] = Field(
        default=0.9, description="probability with which the plan must keep the limits"
    )


class DeviceFilter(Document):
    """Which of the pool's devices may be used; by default all."""

    types: list[str] = Field(default_factory=list, description="device types; empty: all")
    hosts: list[str] = Field(default_factory=list, description="host names; empty: all")
    ids: list[str] = Field(default_factory=list, description="device ids; empty: all")
    exclude: list[str] = Field(default_factory=list, description="types, hosts or ids not to use")
    min_count: int = Field(default=1, ge=1, description="lowest number of devices")
    max_count: int | None = Field(default=None, ge=1, description="highest number of devices")

    @model_validator(mode="after")
    def _ordered(self) -> DeviceFilter:
        for field in ("types", "hosts", "ids", "exclude"):
            names = getattr(self, field)
            twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
            if twice is not None:
                raise ValueError(f"{field} with each name once, not {twice!r} twice")
        if self.max_count is not None and self.max_count < self.min_count:
            raise ValueError(
                f"max_count of at least min_count ({self.min_count}), not {self.max_count}"
            )
        return self


class RecommendOptions(Document):
    """How a model is recommended for a job that names none."""

    templates: list[str] = Field(
        default_factory=list,
        description="templates to choose from, also in one size, as in linear-small; empty: all",
    )
    top: int = Field(
        default=5, ge=1, le=100, description="how many candidates the recommendation lists at most"
    )
    probe: bool = Field(
        default=False,
        description="train the best three for a short time on a sample of the training rows, for "
        "at most a tenth of the deadline, and order them by what they reach",
    )


class Schedule(Document):
    """When Airflow runs the job by itself."""

    cron: Cron | None = Field(default=None, description="five cron fields, UTC")
    on_new_data: bool = Field(default=False, description="whenever the data's Asset is updated")


class Promotion(Document):
    """When a finished model gets an alias in the store."""

    alias: Name = Field(default="production", description="the alias, which serving follows")
    require_approval: bool = Field(default=False, description="whether a person must approve first")
    only_if_better: Metric | None = Field(
        default=None,
        description="metric by which the model must beat the current one; default: train.target's, "
        "if there is one",
    )


class Job(Document):
    """A training job. Every field's description is its help in the form."""

    name: Name
    pool: str | None = Field(
        default=None, min_length=1, description="a pool file; default: this machine"
    )
    priority: int = Field(
        default=0, ge=-100, le=100, description="priority in the queue for devices; higher first"
    )
    queue_timeout: Wait = Field(
        default=3600.0,
        description="how long to wait for devices that others hold, such as 30m; 0s: do not wait",
    )
    data: DataSpec
    model: ModelSpec | None = Field(
        default=None, description="the model's source; left out: recommended and generated"
    )
    recommend: RecommendOptions = RecommendOptions()
    train: TrainSpec = TrainSpec()
    objective: Objective = Objective()
    devices: DeviceFilter = DeviceFilter()
    schedule: Schedule | None = None
    promotion: Promotion | None = None

    @model_validator(mode="after")
    def _values_may_miss_without_a_model(self) -> Job:
        if self.model is None and self.data.missing == "auto":
            kept = self.data.model_copy(update={"missing": "keep"})
            object.__setattr__(self, "data", kept)  # frozen, and still being made
        return self

    @property
    def needs_approval(self) -> bool:
        """Whether a person must approve before an alias points at a model of this job."""
        return self.promotion is not None and self.promotion.require_approval


def load_job(
    source: str | Path | dict[str, Any],
    pool: str | Path | None = None,
    changes: Sequence[str] = (),
) -> Job:
    """The job in a file, or in a mapping (for example an Airflow parameter).

    `changes` are assignments such as `train.epochs=3`; `pool` overrides the job's pool. Paths
    become absolute: those in a file relative to the file; those in a mapping, in `changes` and in
    `pool` relative to the current folder. Raises BadInput with one line.
    """
    if isinstance(source, dict):
        values, base, name = source, Path.cwd(), "job"
    else:
        path = Path(source).absolute()
        values, base, name = read_mapping(path), path.parent, str(source)
    for change in changes:
        values = changed(values, change)
    try:
        job = validated(Job, values, name)
        require_metrics(job, name)
    except BadInput as error:
        problem = str(error).removeprefix(f"{name}: ")
        for field in (change.partition("=")[0] for change in changes):
            if problem.startswith((f"{field}:", f"{field}.")):
                raise BadInput(f"--set {problem}") from None
        raise
    data = job.data.model_copy(
        update={
            "uri": _absolute(job.data.uri, base, "data.uri"),
            "expectations": job.data.expectations
            and _absolute(job.data.expectations, base, "data.expectations"),
        }
    )
    model = job.model
    if model is not None and (model.source.endswith(".py") or "/" in model.source):
        model = model.model_copy(update={"source": _absolute(model.source, base, "model.source")})
    chosen = (
        str(Path(pool).absolute())
        if pool is not None
        else job.pool and _absolute(job.pool, base, "pool")
    )
    return job.model_copy(update={"data": data, "model": model, "pool": chosen})


_FILES = ("data.uri", "data.expectations", "pool")
_OF_YAML = tuple("*&!@`%|>")
"""A text that begins with one of these means something else in YAML."""


def changed(values: dict[str, Any], change: str) -> dict[str, Any]:
    """A job's mapping with one field set by `FIELD=VALUE`: FIELD is dotted, VALUE is YAML.

    Raises BadInput if `change` is not an assignment, or a part of FIELD is a value without fields.
    """
    field, equals, text = change.partition("=")
    parts = field.split(".")
    if not equals or not all(part.isidentifier() for part in parts):
        raise BadInput(f"--set: got {change!r}; allowed: FIELD=VALUE, such as train.epochs=3")
    try:
        value = parse_value(text, f"--set {field}")
    except BadInput as error:
        quote = " (quote the value)" if text.startswith(_OF_YAML) else ""
        raise BadInput(f"{error}{quote}") from None
    if isinstance(value, str) and (field in _FILES or (field == "model.source" and "/" in value)):
        value = _absolute(value, Path.cwd(), f"--set {field}")
    made: dict[str, Any] = dict(values)
    inside = made
    for part in parts[:-1]:
        below = inside.get(part)
        if below is not None and not isinstance(below, dict):
            raise BadInput(f"--set {field}: {part} is {kind_of(below)}, which has no fields")
        inside[part] = dict(below or {})
        inside = inside[part]
    inside[parts[-1]] = value
    return made


def require_metrics(
    job: Job, name: str, task: Task | None = None, classes: int | None = None
) -> None:
    """Raise BadInput if the task lacks a metric of the job or classes to smooth, or for no share.

    `task` and `classes` are those of the data, if known; else the job's task counts, if given. Not
    a validator of the class: jobs stored by earlier versions may hold such values.
    """
    target, promotion, task = job.train.target, job.promotion, task or job.data.task
    stopping, smoothing = job.train.early_stopping, job.train.label_smoothing
    named = {
        "train.target.metric": target and target.metric,
        "train.early_stopping.metric": stopping and stopping.metric,
        "promotion.only_if_better": promotion and promotion.only_if_better,
    }
    for field, metric in named.items():
        if metric and task and metric not in (known := metrics_of(task, classes)):
            raise BadInput(
                f"{name}: {field}: got {metric!r}; allowed for {task}: {', '.join(known)}"
            )
    if smoothing and task and not task.endswith("classification"):
        raise BadInput(
            f"{name}: train.label_smoothing: got {smoothing:g}; allowed for {task}: 0, as it has "
            "no classes"
        )
    if target is not None and target.metric in SHARES and not 0 < target.value <= 1:
        raise BadInput(
            f"{name}: train.target.value: got {target.value:g}; "
            "allowed: a share above 0, up to 1, such as 0.97 for 97 %"
        )


def _absolute(uri: str, base: Path, field: str) -> str:
    if uri.startswith("builtin:") or "://" in uri:
        return uri
    try:
        return str((base / uri).resolve())
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a NUL character
        raise BadInput(f"{field}: got {uri!r}; it can't be resolved to a path ({error})") from None


MOST_SAMPLES = 1_000_000
"""In one step."""


def check_batch_size(batch_size: int) -> None:
    """Raise BadInput if a step cannot have this many samples."""
    if not 1 <= batch_size <= MOST_SAMPLES:
        raise BadInput(f"batch size: got {batch_size}; allowed: 1 to {MOST_SAMPLES}")
