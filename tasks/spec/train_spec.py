"""The part `train` of a job: optimizer, rate, batch, checkpoints, faults, when training ends."""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from trainwright.tasks.errors import BadInput
from trainwright.tasks.spec.documents import Document, Duration, Wait
from trainwright.tasks.spec.metric_names import Metric

_MOST_STEPS = 1_000_000_000
MOST_SAMPLES = 1_000_000
"""In one step."""


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


LayoutWord = Literal[
    "auto",
    "data-parallel",
    "late-multiply",
    "sharded",
    "hybrid",
    "averaging",
    "mixed",
    "pipeline",
]
LAYOUT_WORDS: tuple[LayoutWord, ...] = get_args(LayoutWord)
Recompute = Literal["auto", "none", "all"]


class LayoutSpec(Document):
    """Parts of a layout that the job fixes; the planner chooses the rest."""

    name: Literal["auto", "averaging", "mixed", "pipeline"] = Field(
        default="auto",
        description="averaging: devices train alone for some steps, then average their parameters; "
        "mixed: so for the largest layers only; pipeline: the model is cut into stages on several "
        "devices; auto: averaging if a field of averages is set, pipeline if one of pipelines is, "
        "else neither",
    )

    @field_validator("name", mode="before")
    @classmethod
    def _words_stand_alone(cls, name: Any) -> Any:
        """Name the layouts that are a word of their own, without fields."""
        if name in ("data-parallel", "late-multiply", "sharded", "hybrid"):
            raise PydanticCustomError(
                "word",
                "auto, averaging, mixed or pipeline; {word} has no fields: train.layout: {word}",
                {"word": name},
            )
        return name

    stages: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="stages of each pipeline; default: so many that a step is shortest",
    )
    replicas: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="pipelines, each with its part of the batch; default: chosen by prediction",
    )
    micro_batches: int | None = Field(
        default=None,
        ge=1,
        le=MOST_SAMPLES,
        description="micro-batches of each pipeline in a step; default: chosen by prediction",
    )
    schedule: Literal["auto", "gpipe", "1f1b", "zero-bubble"] = Field(
        default="auto",
        description="the order in which stages compute micro-batches; gpipe: all forward passes, "
        "then all backward passes; 1f1b: backward passes as soon as possible; zero-bubble: the "
        "same, and weight gradients while a stage would wait; auto: the shortest step; of no "
        "effect with one stage",
    )
    dense: Literal["auto", "sum", "factors", "rows"] = Field(
        default="auto",
        description="how copies of dense layers are kept equal; sum: gradients are summed; "
        "factors: inputs and output gradients are gathered, and multiplied by all (late multiply); "
        "rows: each device holds some rows of the weight (sharded)",
    )
    batch_norm: Literal["joint", "micro-batch"] = Field(
        default="joint",
        description="statistics of batch normalisation in pipelines; joint: of the whole batch, "
        "which allows one micro-batch; micro-batch: each has its own, which changes the "
        "mathematics of training",
    )
    chunk_bytes: int | None = Field(
        default=None,
        ge=1024,
        le=1 << 34,
        description="gradients are summed in chunks of this size; default: chosen by prediction "
        "if devices are on several machines, else 4 MiB",
    )
    factor_type: Literal["fp32", "bf16"] = Field(
        default="fp32", description="type in which factors are sent; bf16 halves their bytes"
    )
    average_every: int | None = Field(
        default=None,
        ge=1,
        le=_MOST_STEPS,
        description="most steps between averages; default: so many that averages take little of "
        "the time and of the bytes",
    )
    local_batch: int | None = Field(
        default=None,
        ge=1,
        le=MOST_SAMPLES,
        description="samples of a device's own step with averaging, so that a faster device does "
        "more steps; default: chosen by predicted speed",
    )
    outer: Literal["none", "block-momentum", "nesterov"] = Field(
        default="none",
        description="what follows an average; block-momentum: BMUF; nesterov: as in DiLoCo",
    )
    recompute: Recompute = Field(
        default="auto",
        description="whether modules do their forward pass again in the backward pass, to save "
        "memory; auto: as few as needed, on devices whose memory does not hold a step otherwise, "
        "if that takes less time than more micro-batches; all: those that save most",
    )

    @property
    def pipelined(self) -> bool:
        """Whether pipelines of several stages are wanted."""
        return bool(self.of_pipelines)

    @property
    def of_pipelines(self) -> list[str]:
        """The fields that ask for pipelines."""
        given = {
            "name": self.name == "pipeline",
            "stages": self.stages is not None,
            "replicas": self.replicas is not None,
            "micro_batches": self.micro_batches is not None,
            "schedule": self.schedule != "auto",
            "batch_norm": self.batch_norm != "joint",
        }
        return [name for name, asks in given.items() if asks]

    @property
    def why_averages(self) -> str:
        """The fields that ask for averages."""
        given = {
            f"name: {self.name}": self.name in ("averaging", "mixed"),
            f"average_every: {self.average_every}": self.average_every is not None,
            f"local_batch: {self.local_batch}": self.local_batch is not None,
            f"outer: {self.outer}": self.outer != "none",
        }
        return ", ".join(name for name, asks in given.items() if asks)

    @property
    def averages(self) -> Literal["averaging", "mixed"] | None:
        """The layout with averages that is wanted, if one is."""
        if self.name in ("averaging", "mixed"):
            return self.name
        fields = self.average_every, self.local_batch, None if self.outer == "none" else self.outer
        return "averaging" if any(one is not None for one in fields) else None


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
        description="share of each label that is spread over all classes while training; "
        "validation's loss is without it. The model source's own loss needs a parameter of this "
        "name",
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
        default="auto",
        description="library for collectives; auto: Horovod if it is installed and no rank runs "
        "in a container or pod",
    )
    layout: LayoutSpec | LayoutWord = Field(
        default="auto",
        description="how a step is divided among devices; auto: between machines the fastest by "
        "prediction, none of which changes the mathematics of training, as averaging and mixed "
        "do; on one machine data-parallel",
    )
    adaptive_split: bool = Field(
        default=True,
        description="correct the batch split, and the cuts of pipelines, by measured step times",
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

    @property
    def pipeline(self) -> LayoutSpec | None:
        """What the job fixes of pipelines; None: it asks for none."""
        if self.layout == "pipeline":
            return LayoutSpec(name="pipeline")
        asked = isinstance(self.layout, LayoutSpec) and self.layout.pipelined
        return self.layout if asked and isinstance(self.layout, LayoutSpec) else None

    @model_validator(mode="after")
    def _pipelines_fit_the_rest(self) -> TrainSpec:
        spec = self.pipeline
        if spec is None:
            return self
        if spec.averages is not None:
            name = spec.of_pipelines[0]
            raise _refused(
                f"layout.{name}",
                f"{getattr(spec, name)} with {spec.why_averages}",
                "fields of pipelines or of averages, not of both",
            )
        if spec.stages == 1:
            raise _refused(
                "layout.stages",
                1,
                "2 or more, as pipelines have several stages; train.layout: data-parallel for "
                "whole models",
            )
        if self.adaptive_batch:
            raise _refused(
                "adaptive_batch", "true", "false with pipelines, whose micro-batches are fixed"
            )
        return self

    @property
    def dense(self) -> Literal["factors", "rows"] | None:
        """How the job says that dense layers are kept equal, if not by sums; None: not fixed."""
        fixed: dict[str, Literal["factors", "rows"]] = {
            "late-multiply": "factors",
            "sharded": "rows",
        }
        if isinstance(self.layout, str):
            return fixed.get(self.layout)
        return self.layout.dense if self.layout.dense in ("factors", "rows") else None

    @property
    def averages(self) -> Literal["averaging", "mixed"] | None:
        """The layout with averages that the job asks for, if it does."""
        if isinstance(self.layout, LayoutSpec):
            return self.layout.averages
        return self.layout if self.layout in ("averaging", "mixed") else None

    @property
    def recomputes(self) -> Recompute:
        """Whether modules are recomputed."""
        return self.layout.recompute if isinstance(self.layout, LayoutSpec) else "auto"

    @model_validator(mode="after")
    def _averages_fit_the_rest(self) -> TrainSpec:
        if self.averages == "averaging" and self.adaptive_batch:
            raise ValueError(
                "adaptive_batch false with the layout averaging, whose devices don't measure the "
                "noise of joint gradients"
            )
        if not isinstance(self.layout, LayoutSpec):
            return self
        if self.averages == "averaging" and self.layout.dense != "auto":
            raise ValueError(
                f"layout.dense {self.layout.dense} with layout.name mixed only; averaging averages "
                "all layers"
            )
        if self.averages == "mixed" and self.layout.local_batch is not None:
            raise ValueError(
                f"layout.local_batch ({self.layout.local_batch}) with layout.name averaging only; "
                "the devices of mixed do joint steps"
            )
        return self

    @model_validator(mode="after")
    def _factors_are_sent(self) -> TrainSpec:
        spec = self.layout
        if not isinstance(spec, LayoutSpec) or spec.factor_type == "fp32":
            return self
        if self.averages == "averaging":
            raise ValueError(
                f"layout.factor_type {spec.factor_type} without the layout averaging, which sends "
                "no factors"
            )
        if spec.dense in ("sum", "rows"):
            raise ValueError(
                f"layout.factor_type {spec.factor_type} with layout.dense factors or auto only; "
                f"{spec.dense} sends no factors"
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


def _refused(field: str, given: object, allowed: str) -> PydanticCustomError:
    """An error of fields that contradict each other: the field, what was given, what is allowed."""
    text = f"{field}: got {given}; allowed: {allowed}"
    return PydanticCustomError("contradiction", "{text}", {"text": text})


def check_batch_size(batch_size: int) -> None:
    """Raise BadInput if a step cannot have this many samples."""
    if not 1 <= batch_size <= MOST_SAMPLES:
        raise BadInput(f"batch size: got {batch_size}; allowed: 1 to {MOST_SAMPLES}")
