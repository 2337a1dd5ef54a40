"""The job file: which data, which model, how to train, by when.

The same class defines the file, the REST body and the form. Paths in a job file are relative to
the file; `load_job` makes them absolute. docs/how-to/job-file.md shows examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from trainwright.estimator.near_names import meant
from trainwright.tasks.errors import BadInput
from trainwright.tasks.spec.cron import Cron
from trainwright.tasks.spec.data_spec import DataSpec, Task
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
from trainwright.tasks.spec.export_spec import ExportSpec
from trainwright.tasks.spec.metric_names import SHARES, Metric, metrics_of
from trainwright.tasks.spec.objective import DeviceFilter, Objective
from trainwright.tasks.spec.other_documents import refuse_other, refuse_run
from trainwright.tasks.spec.train_spec import TrainSpec

Name = Annotated[
    str,
    matching(
        r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$",
        "1 to 63 lower-case letters, digits and -, not beginning or ending with -",
        description="lower-case letters, digits, -",
    ),
]
Scalar = str | int | float | bool | None


class JobName(Document):
    """A job's name that a person gave."""

    name: Name


class ModelSpec(Document):
    """The model of a job."""

    source: str = Field(
        min_length=1, description="path/to/model.py, or a module that defines build_model"
    )
    config: dict[str, Scalar | list[Scalar]] = Field(
        default_factory=dict, description="arguments of build_model"
    )


TEMPLATES = (
    "linear",
    "realmlp",
    "tabm",
    "wide",
    "text-convolution",
    "ngram-bag",
    "depthwise-network",
    "residual-network",
    "dlinear",
    "n-hits",
)
"""The families of models that can be recommended (`tasks.recommend.templates`)."""
SIZES = ("small", "medium", "large")


_PROBE_WORDS = {True: "always", False: "never"}
WhenProbed = Annotated[
    Literal["auto", "always", "never"],
    BeforeValidator(lambda given: _PROBE_WORDS[given] if isinstance(given, bool) else given),
]


class RecommendOptions(Document):
    """How a model is recommended for a job that names none."""

    templates: list[str] = Field(
        default_factory=list,
        description=f"templates to choose from: {', '.join(TEMPLATES)}, also in one size, as in "
        "linear-small; empty: all",
    )
    top: int = Field(
        default=5, ge=1, le=100, description="how many candidates the recommendation lists at most"
    )
    probe: WhenProbed = Field(
        default="auto",
        description="train the best few candidates for a short time and order them by what they "
        "reach on the same rows; auto: if their predictions do not tell them apart; true and "
        "false: always and never",
    )
    probe_time: Duration | None = Field(
        default=None,
        description="for all short trainings; default: a tenth of the deadline, at most 2 minutes",
    )
    probe_steps: int | None = Field(
        default=None,
        ge=1,
        description="optimizer steps of each short training, whatever time they take, so that "
        "the order does not depend on the machine; default: as many as fit into `probe_time`",
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
    export: ExportSpec = ExportSpec()

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
        refuse_run(source, "job")
        path = Path(source).absolute()
        values, base, name = read_mapping(path), path.parent, str(source)
        refuse_other(values, "job", name)
    for change in changes:
        values = changed(values, change)
    try:
        job = validated(Job, values, name)
        require_metrics(job, name)
        require_templates(job, name)
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
        if below not in (None, "auto") and not isinstance(below, dict):
            raise BadInput(f"--set {field}: {part} is {kind_of(below)}, which has no fields")
        inside[part] = dict(below) if isinstance(below, dict) else {}
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
            part = field if field.startswith("promotion") else field.rpartition(".")[0]
            wrong = f" (or clear data.task, if {task} is wrong)" if job.data.task else ""
            raise BadInput(
                f"{name}: {field}: got {metric!r}; allowed for {task}: {', '.join(known)}; "
                f"or clear {part}{wrong}"
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


def require_templates(job: Job, name: str) -> None:
    """Raise BadInput if the job names a template that does not exist.

    Not a validator of the class: jobs stored by later versions may name others.
    """
    known = {*TEMPLATES, *(f"{one}-{size}" for one in TEMPLATES for size in SIZES)}
    for one in job.recommend.templates:
        if one not in known:
            raise BadInput(
                f"{name}: recommend.templates: got {one!r}; allowed: {', '.join(TEMPLATES)}, also "
                f"in one size, as in linear-small{meant(one, known)}"
            )


def _absolute(uri: str, base: Path, field: str) -> str:
    if uri.startswith("builtin:") or "://" in uri:
        return uri
    try:
        return str((base / uri).resolve())
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a NUL character
        raise BadInput(f"{field}: got {uri!r}; it can't be resolved to a path ({error})") from None
