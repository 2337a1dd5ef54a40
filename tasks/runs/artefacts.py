"""What flows from step to step: one frozen model per file of the run folder.

    validate -> Validation   extract -> Structure   estimate -> Estimate   allocate -> Plan
    search_lr -> LearningRateSearch   train -> Result   store -> Manifest   analyze -> Report

`Structure` is the estimator's (`trainwright.estimator.structure`). Every artefact has a `schema_version` and ignores
fields it does not know, so that each version reads its neighbours' files. Units stand in the names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from trainwright.estimator.curves import Affine, DeviceCurve, Interval, Mode
from trainwright.estimator.predict.communication import Link
from trainwright.estimator.predict.energy import PowerDraw
from trainwright.tasks.spec.job import Job, Task
from trainwright.tasks.spec.pool import Device

State = Literal["running", "success", "failed", "infeasible", "interrupted"]


class Value(BaseModel):
    """A part of an artefact."""

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="strings")


class Artefact(Value):
    """A file of the run folder."""

    FILE: ClassVar[str]
    schema_version: int = 1


class RunJob(Job):
    """job.json: the job as it runs, its paths absolute."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    FILE: ClassVar[str] = "job.json"
    schema_version: int = 1


class Status(Artefact):
    """status.json: how far the run is. The one file that changes, and the only one the manifest leaves out."""

    FILE: ClassVar[str] = "status.json"
    state: State
    step: str | None = Field(
        default=None, description="the step that runs, or in which the run ended"
    )
    holder: str
    started_at: str
    updated_at: str
    steps: dict[str, float] = Field(
        default_factory=dict, description="seconds each finished step took"
    )
    error: dict[str, Any] | None = None


class DataSchema(Value):
    """What the data looks like to a model. Shapes are of one sample, without the batch."""

    task: Task
    rows: int
    train_rows: int
    validation_rows: int
    inputs: dict[str, tuple[int, ...]] = Field(
        description="shape by input; one input is called `inputs`"
    )
    input_dtypes: dict[str, str]
    target: str
    target_dtype: str
    classes: list[str] | None = Field(
        default=None, description="labels in the order of their numbers"
    )
    sha256: str = Field(description="of the content, so that a change is seen")


class Expectation(Value):
    """One expectation and how the data met it."""

    expectation: str
    column: str | None = None
    expected: dict[str, Any] = Field(default_factory=dict)
    success: bool
    observed: Any = None
    unexpected_count: int | None = None
    sample_rows: list[dict[str, Any]] = Field(
        default_factory=list, description="rows that fail it, with their index"
    )


class Validation(Artefact):
    """validation.json"""

    FILE: ClassVar[str] = "validation.json"
    success: bool
    suite_source: Literal["given", "kept", "inferred"]
    suite: list[dict[str, Any]] = Field(
        description="the expectations, as Great Expectations writes them"
    )
    expectations: list[Expectation]
    data: DataSchema | None = Field(
        default=None, description="None where the data can't even be described"
    )
    checked_rows: int
    great_expectations: dict[str, Any] = Field(description="Great Expectations' own result")


class Estimate(Artefact):
    """estimate.json: one curve for each kind of device in the pool."""

    FILE: ClassVar[str] = "estimate.json"
    mode: Mode
    curves: list[DeviceCurve]
    learned_from: int = Field(
        default=0, description="finished runs that corrected the curves, the most of any"
    )
    gradient_bytes: float = Field(description="what an all-reduce carries each step")
    calibrations: dict[str, str] = Field(
        default_factory=dict, description="sha256 of the calibration, by device kind"
    )
    local_link: Link | None = Field(
        default=None,
        description="between ranks of this machine, measured; None: not needed, or not measured",
    )
    cycle_s: float = Field(
        default=0.0, description="how often the collectives' library begins sums; 0: at once"
    )

    def curve(self, device: Device) -> DeviceCurve:
        """The curve of a device's kind."""
        for curve in self.curves:
            if (curve.device_type, curve.cores, curve.speed) == device.variant:
                return curve
        raise KeyError(device.variant)


class PlannedDevice(Device):
    """A device of the plan, with its share of each step."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    batch_size: int
    most_batch_size: int | None = Field(
        default=None,
        description="samples a step that its memory holds, beside the other ranks; None: not known",
    )
    step_time_s: Interval = Field(description="of its own share, without waiting for the others")
    loop_s: float | None = Field(
        default=None,
        description="of the step time, what training adds to the model's own step; None: it is not in it",
    )
    peak_memory_bytes: float
    memory_bytes: Affine | None = Field(
        default=None, description="of the rank, over its batch size, where it is known"
    )
    power: PowerDraw | None = Field(
        default=None, description="what the prediction took the device to draw"
    )
    mode: Mode | None = Field(default=None, description="what the prediction is made of")

    def largest_batch(self, limit_bytes: float) -> int | None:
        """The largest batch that the memory curve puts within a limit; None where there is no curve that rises."""
        line = self.memory_bytes
        if line is None or line.per_sample <= 0:
            return None
        return max(0, int((limit_bytes - line.fixed) // line.per_sample))


class Prediction(Value):
    """What a plan is predicted to take."""

    step_time_s: Interval
    duration_s: Interval
    energy_j: Interval | None
    cost: Interval | None


class NotExceeded(Value):
    """What a plan takes at most, at the job's confidence: its deadline and budget are held against this."""

    confidence: float
    duration_s: float
    cost: float | None = Field(description="in the pool's currency")


class Alternative(Value):
    """A configuration that lost, and why."""

    devices: dict[str, int] = Field(description="count by kind of device")
    global_batch_size: int
    accumulation: int = 1
    predicted: Prediction | None = None
    feasible: bool
    reason: str


class FrontPoint(Value):
    """A configuration that none is better than in time, energy and cost at once."""

    time: float = Field(description="duration, s: median")
    energy: float | None = Field(description="J")
    cost: float | None = Field(description="in the pool's currency")
    devices: dict[str, int] = Field(description="count by kind of device")
    global_batch_size: int
    accumulation: int = 1
    feasible: bool = Field(description="within the job's limits at its confidence")
    chosen: bool = Field(default=False, description="the plan itself")


class HeldDevice(Value):
    """A device that a run holds."""

    id: str
    holder: str
    run: str
    until: str = Field(description="when the lease ends unless it is renewed, ISO 8601, UTC")


_HELD: Any = Field(
    default=None,
    description="devices of the pool that runs held when it was made, which takes all of them to be free; None: not looked at",
)


class Plan(Artefact):
    """plan.json. The objective is compared by medians; limits are held at the job's confidence."""

    FILE: ClassVar[str] = "plan.json"
    feasible: bool
    objective: Literal["energy", "cost", "time"]
    devices: list[PlannedDevice]
    global_batch_size: int
    steps_per_epoch: int
    epochs: int
    strategy: dict[str, Any]
    predicted: Prediction | None
    not_exceeded: NotExceeded | None = Field(
        default=None, description="what the limits are held against"
    )
    deadline_s: float | None
    budget: float | None = Field(default=None, description="in the pool's currency")
    binding: str | None = Field(default=None, description="where infeasible: the limit that binds")
    nearest: dict[str, float] = Field(
        default_factory=dict, description="where infeasible: deadline_s, budget that would do"
    )
    alternatives: list[Alternative] = Field(default_factory=list)
    front: list[FrontPoint] = Field(
        default_factory=list,
        description="Pareto front of time against energy and cost at this global batch, quickest first",
    )
    batches: list[FrontPoint] = Field(
        default_factory=list,
        description="the best for each global batch that was not out of the question",
    )
    accumulation: int = Field(
        default=1, description="micro-batches that every rank takes a step in"
    )
    batch_rule: str | None = Field(default=None, description="why this global batch")
    search: Literal["exact", "bounded", "greedy"] = Field(
        default="exact", description="bounded: nothing is better by more than `gap`"
    )
    gap: float = Field(
        default=0.0, description="by how much, relatively, another configuration can be better"
    )
    held: list[HeldDevice] | None = _HELD
    solve_time_s: float = Field(
        description="until the plan was found; alternatives and front take more"
    )

    @property
    def resources(self) -> list[str]:
        """The ledger's names of the plan's devices."""
        return [device.resource for device in self.devices]


class ScheduledJob(Value):
    """A job of a joint plan."""

    job: str
    starts_s: float = Field(description="after now")
    ends_s: float = Field(description="after now, not exceeded at the job's confidence")
    deadline_s: float | None
    slips: bool = Field(description="it can not meet its deadline with the others")
    devices: list[PlannedDevice]
    global_batch_size: int
    accumulation: int = Field(
        default=1, description="micro-batches that every rank takes a step in"
    )
    predicted: Prediction


class JointPlan(Value):
    """Several jobs on one pool: when each runs on which devices."""

    feasible: bool = Field(description="whether every job meets its deadline")
    objective: Literal["energy"] = "energy"
    jobs: list[ScheduledJob] = Field(description="in the order of their starts")
    energy_j: float = Field(description="of all jobs, median")
    slips: list[str] = Field(
        default_factory=list, description="the jobs that must miss their deadline"
    )
    late_alone: dict[str, str] = Field(
        default_factory=dict,
        description="those of them that would miss it with all devices to themselves too, and why",
    )
    held: list[HeldDevice] | None = _HELD
    search: Literal["exact", "bounded"] = Field(
        description="exact: every choice of devices and every order was open; bounded: not all. Of how late those are that slip "
        "it says nothing: that is found in steps"
    )
    gap: float | None = Field(
        default=0.0,
        description="bounded: by what share the energy can be less, were each job alone and in time, or late as it is; none "
        "where not all choices of devices were looked at",
    )
    solve_time_s: float


class LearningRatePoint(Value):
    """One step of the ramp."""

    learning_rate: float
    loss: float
    smoothed_loss: float
    accuracy: float | None = None
    smoothed_accuracy: float | None = None


class LearningRateTrial(Value):
    """A short training at one rate, from the training's own start."""

    learning_rate: float
    loss: float = Field(description="mean over its last quarter; infinite where it ran away")
    steps: int


class CurveFit(Value):
    """A curve fitted over x = log10(learning rate)."""

    curve: Literal["loss", "accuracy"]
    kind: Literal["polynomial", "logarithmic"]
    coefficients: list[float]
    low: float = Field(description="least learning rate it was fitted on")
    high: float = Field(description="greatest")
    r2: float


class LearningRateSearch(Artefact):
    """lr_search.json; the plot is lr_search.html beside it."""

    FILE: ClassVar[str] = "lr_search.json"
    learning_rate: float
    interval: tuple[float, float]
    source: Literal["searched", "given", "replayed"]
    reason: str
    points: list[LearningRatePoint] = Field(default_factory=list)
    fits: list[CurveFit] = Field(default_factory=list)
    trials: list[LearningRateTrial] = Field(
        default_factory=list, description="in the order in which they were made"
    )
    diverged_at: float | None = None
    plot: str | None = None


class SplitEvent(Value):
    """Which split holds from `step` on, and why: it changed, the global batch (its sum) did, or other processes took it over."""

    step: int
    batch_sizes: list[int] = Field(description="by rank")
    reason: str


def split_since(events: Sequence[SplitEvent], planned: list[int]) -> int:
    """The step since which the shares are what they are at the end."""
    since, split = 0, planned
    for event in events:
        if event.batch_sizes != split:
            since, split = event.step, event.batch_sizes
    return since


class DeviceResult(Value):
    """What one device did."""

    id: str
    type: str
    rank: int
    batch_size: int = Field(description="at the end")
    samples: int
    step_time_s: Interval | None = Field(
        description="measured: median, 5th and 95th percentile of its own work"
    )
    wait_s: float = Field(description="spent waiting for slower ranks")
    communication_s: float | None = Field(
        default=None,
        description="spent in sums over ranks beyond that; None: in wait_s (an earlier version's)",
    )
    peak_memory_bytes: float
    cpu_s: float = Field(description="of its processes since the run was last begun or resumed")
    share: str = Field(description="how it was held to its share of the CPU")


class Measured(Value):
    """The measured side of Prediction."""

    step_time_s: Interval | None
    duration_s: float
    peak_memory_bytes: float
    energy_j: float | None
    energy_source: str | None
    cost: float | None


class Checkpoint(Value):
    """A checkpoint of the run folder."""

    path: str
    step: int
    metrics: dict[str, float] = Field(default_factory=dict)
    best: bool = False


class Result(Artefact):
    """result.json"""

    FILE: ClassVar[str] = "result.json"
    state: State
    metrics: dict[str, float]
    target_reached: bool | None
    predicted: Prediction | None
    measured: Measured
    devices: list[DeviceResult]
    split_events: list[SplitEvent]
    checkpoints: list[Checkpoint]
    learning_rate: float
    global_batch_size: int = Field(description="as planned; it may have grown (split_events)")
    steps: int
    epochs: int
    noise_scale: float | None = Field(
        default=None, description="the gradient's, in samples, at the end; None: not measured"
    )
    resumed_from_step: int | None
    backend: str
    versions: dict[str, str]


class SealedFile(Value):
    """A file of a manifest."""

    size: int
    sha256: str


class Manifest(Artefact):
    """manifest.json: seals the run; written once, last."""

    FILE: ClassVar[str] = "manifest.json"
    run: str
    sealed_at: str
    files: dict[str, SealedFile]


class Report(Artefact):
    """report/report.json: the numbers behind report/report.html."""

    FILE: ClassVar[str] = "report/report.json"
    html: str = "report/report.html"
    run: str
    runs_compared: int
    engine: str = Field(
        description="what did the arithmetic: dask, or pandas below the stated size"
    )
    epochs: list[dict[str, float | None]] = Field(description="loss and metrics by epoch")
    predicted_and_measured: list[dict[str, Any]]
    devices: list[dict[str, Any]]
    history: list[dict[str, Any]] = Field(
        description="this run, its job's earlier runs, the others: each newest first"
    )
