"""What flows from step to step: one frozen model per file of the run folder.

    validate -> Validation, Vocabulary   recommend -> Recommendation   extract -> Structure
    estimate -> Estimate   allocate -> Plan   search_lr -> LearningRateSearch   train -> Result
    store -> Manifest   analyze -> Report

`Structure` is defined in `trainwright.estimator.structure`, `Recommendation` in `recommendation`.
Every artefact has a `schema_version` and ignores unknown fields, so that each version reads the
files of the version before and after it. Names contain units.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from trainwright.estimator.curves import Affine, DeviceCurve, Interval, Mode
from trainwright.estimator.predict.communication import Link
from trainwright.estimator.predict.energy import PowerDraw
from trainwright.tasks.runs.data_profile import DataProfile, Drift
from trainwright.tasks.runs.value import Value
from trainwright.tasks.spec.data_spec import Task
from trainwright.tasks.spec.job import Job
from trainwright.tasks.spec.pool import Device
from trainwright.tasks.spec.recipe import given_fields

RunState = Literal["running", "success", "failed", "infeasible", "interrupted"]


class Artefact(Value):
    """A file of the run folder."""

    FILE: ClassVar[str]
    schema_version: int = 1


class RunJob(Job):
    """job.json: the run's job, with absolute paths."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    FILE: ClassVar[str] = "job.json"
    schema_version: int = 1
    given: list[str] = Field(
        default_factory=list,
        description="names of the fields of `train` that the user set; the recipe of a recommended "
        "model fills in others",
    )

    @classmethod
    def of(cls, job: Job) -> RunJob:
        """A job as its runs store it."""
        given = [name for name in given_fields(job) if name.startswith("train.")]
        return cls.model_validate(job.model_dump(mode="json") | {"given": given})


class Status(Artefact):
    """status.json: the run's progress. It changes after sealing, so the manifest omits it."""

    FILE: ClassVar[str] = "status.json"
    state: RunState
    step: str | None = Field(
        default=None, description="the running step, or the one in which the run ended"
    )
    holder: str
    started_at: str
    updated_at: str
    steps: dict[str, float] = Field(default_factory=dict, description="seconds by finished step")
    error: dict[str, Any] | None = None


class Column(Value):
    """A column of the data that a model gets, or an input made of several of them."""

    name: str
    kind: Literal["number", "category", "text", "image", "time", "series"]
    missing: int = Field(default=0, description="rows without a value")
    vocabulary: int = Field(
        default=0,
        description="codes of a category, an upper bound for every split: 0 stands for missing and "
        "unknown values; 0 for columns without codes",
    )


class DataSchema(Value):
    """The data as a model sees it. Shapes are of one sample, without the batch dimension."""

    task: Task
    rows: int
    train_rows: int
    validation_rows: int
    inputs: dict[str, tuple[int, ...]] = Field(
        description="shape by input; a single input is called `inputs`"
    )
    input_dtypes: dict[str, str]
    target: str
    target_dtype: str
    target_shape: tuple[int, ...] = Field(
        default=(), description="(): one class or number a sample; (24,): 24 numbers"
    )
    classes: list[str] | None = Field(
        default=None, description="labels in the order of their numbers"
    )
    dropped: list[str] = Field(
        default_factory=list, description="columns without any value; the model does not get them"
    )
    sha256: str = Field(description="digest of the content; a change of the data changes it")
    columns: list[Column] = Field(
        default_factory=list, description="the columns of the inputs, in their order"
    )


class Expectation(Value):
    """One expectation and whether the data meets it."""

    expectation: str
    column: str | None = None
    expected: dict[str, Any] = Field(default_factory=dict)
    success: bool
    observed: Any = None
    unexpected_count: int | None = None
    sample_rows: list[dict[str, Any]] = Field(
        default_factory=list, description="failing rows, with their index"
    )


REJECTION = "rejection.html"
"""The page of a run whose data was rejected."""


class DataWarning(Value):
    """Something in the data that may be a mistake; it never rejects the data."""

    kind: Literal["leakage", "duplicates", "label_noise"]
    column: str | None = None
    message: str
    rows: list[int] = Field(default_factory=list, description="the first row numbers")


class Validation(Artefact):
    """validation.json"""

    FILE: ClassVar[str] = "validation.json"
    success: bool
    suite_source: Literal["given", "kept", "inferred", "none"] = Field(
        description="none: the model's source reads the data, and nothing is checked"
    )
    suite: list[dict[str, Any]] = Field(
        description="the expectations, in Great Expectations' format"
    )
    expectations: list[Expectation]
    data: DataSchema | None = Field(
        default=None, description="None if no arrays can be made of the data"
    )
    checked_rows: int
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


class Vocabulary(Artefact):
    """vocabulary.json: what the codes of a table with categories stand for."""

    FILE: ClassVar[str] = "vocabulary.json"
    names: dict[str, list[str]] = Field(
        description="by category column: the values of codes 1, 2, … in the training part; and the "
        "classes under the target's name"
    )


class Estimate(Artefact):
    """estimate.json: one curve for each kind of device in the pool."""

    FILE: ClassVar[str] = "estimate.json"
    mode: Mode
    curves: list[DeviceCurve]
    learned_from: int = Field(
        default=0, description="number of finished runs that corrected the curves; the highest"
    )
    gradient_bytes: float = Field(description="bytes that each step's all-reduce carries")
    calibrations: dict[str, str] = Field(
        default_factory=dict, description="sha256 of the calibration, by device kind"
    )
    local_link: Link | None = Field(
        default=None,
        description="measured link between ranks of this machine; None: not needed or not measured",
    )
    cycle_s: float = Field(
        default=0.0,
        description="interval at which the collectives' library starts sums; 0: at once",
    )

    def curve(self, device: Device) -> DeviceCurve:
        """The curve for a device. Raises KeyError if there is none."""
        found = self.find(device)
        if found is None:
            raise KeyError(device.variant)
        return found

    def find(self, device: Device) -> DeviceCurve | None:
        """The curve for a device; None if there is none."""
        kind = device.variant
        for curve in self.curves:
            where = (curve.local, curve.host_memory_bytes)
            if (curve.device_type, curve.cores, curve.speed) == kind[:3] and (
                curve.local is None or where == kind[3:]
            ):
                return curve
        return None


class StepShares(Value):
    """What a device does during a step, as shares of the predicted step time; together 1."""

    compute: float
    wait: float = Field(description="for slower devices")
    communicate: float = Field(description="for sums over devices, after the slowest has computed")


class PlannedDevice(Device):
    """A device of the plan, with its share of each step."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    batch_size: int
    most_batch_size: int | None = Field(
        default=None,
        description="samples that its memory can hold, beside the other ranks; None: not known",
    )
    step_time_s: Interval = Field(description="its own work, without waiting for other ranks")
    loop_s: float | None = Field(
        default=None,
        description="the part of the step time that training adds to the model's own step; "
        "None: not included",
    )
    peak_memory_bytes: float
    memory_bytes: Affine | None = Field(
        default=None, description="the rank's memory as a function of its batch size, if known"
    )
    power: PowerDraw | None = Field(default=None, description="power that the prediction assumes")
    mode: Mode | None = Field(default=None, description="the prediction's mode")
    step_shares: StepShares | None = None
    price_per_hour: float | None = Field(
        default=None, description="in the pool's currency; None: not known"
    )
    available: str | None = Field(
        default=None, description="its host's daily window, UTC; None: always"
    )

    def largest_batch(self, limit_bytes: float) -> int | None:
        """The largest batch within a memory limit; None without a rising memory curve."""
        line = self.memory_bytes
        if line is None or line.per_sample <= 0:
            return None
        return max(0, int((limit_bytes - line.fixed) // line.per_sample))


class Prediction(Value):
    """What a plan is predicted to need."""

    step_time_s: Interval
    duration_s: Interval
    energy_j: Interval | None
    cost: Interval | None
    rent: Interval | None = Field(default=None, description="the part of cost for the devices")
    energy_cost: Interval | None = Field(default=None, description="the part of cost for energy")


class NotExceeded(Value):
    """Upper bounds at the job's confidence; the deadline and budget apply to these."""

    confidence: float
    duration_s: float
    cost: float | None = Field(description="in the pool's currency")


class Alternative(Value):
    """A configuration that was not chosen, with the reason."""

    devices: dict[str, int] = Field(description="number of devices by kind")
    global_batch_size: int
    accumulation: int = 1
    predicted: Prediction | None = None
    feasible: bool
    reason: str


class FrontPoint(Value):
    """A Pareto-optimal configuration: none is better in time, energy and cost together."""

    time: float = Field(description="median duration, s")
    energy: float | None = Field(description="J")
    cost: float | None = Field(description="in the pool's currency")
    devices: dict[str, int] = Field(description="number of devices by kind")
    global_batch_size: int
    accumulation: int = 1
    feasible: bool = Field(description="within the job's limits at its confidence")
    chosen: bool = Field(default=False, description="the plan itself")


class SearchedChoices(Value):
    """The choices that a plan was compared with: all combinations of these, within the limits.

    For each, the global batch is divided among the devices in whole samples.
    """

    devices: int = Field(description="devices that the job may use")
    device_sets: int | None = Field(
        description="choices of devices; devices that do not differ, apart from their names, count "
        "as one; None: more than 10^15"
    )
    global_batch_sizes: list[int]
    most_micro_batches: int = Field(
        description="per step, at the plan's global batch; more would be slower"
    )
    layouts: list[str] = Field(description="ways to divide a step among devices")
    without_price: dict[str, int] = Field(
        default_factory=dict,
        description="devices by kind that were left out, as the plan's cost matters and the pool "
        "has no price for them",
    )


class HeldDevice(Value):
    """A device that another run holds."""

    id: str
    holder: str
    run: str
    until: str = Field(description="end of the lease unless it is renewed, ISO 8601, UTC")


_HELD: Any = Field(
    default=None,
    description="devices of the pool that were held when the plan was made; the plan assumes that "
    "they are free; None: not checked",
)


class Plan(Artefact):
    """plan.json. Objectives are compared by medians; limits hold at the job's confidence."""

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
        default=None, description="the values to which the limits apply"
    )
    deadline_s: float | None
    budget: float | None = Field(default=None, description="in the pool's currency")
    binding: str | None = Field(default=None, description="if infeasible: the limit that binds")
    nearest: dict[str, float] = Field(
        default_factory=dict, description="if infeasible: the nearest feasible deadline_s, budget"
    )
    alternatives: list[Alternative] = Field(default_factory=list)
    front: list[FrontPoint] = Field(
        default_factory=list,
        description="Pareto front of time, energy and cost at this global batch, fastest first",
    )
    batches: list[FrontPoint] = Field(
        default_factory=list,
        description="the best configuration of each global batch that was considered",
    )
    accumulation: int = Field(default=1, description="micro-batches per step of every rank")
    batch_rule: str | None = Field(default=None, description="why this global batch was chosen")
    search: Literal["exact", "bounded", "greedy"] = Field(
        default="exact",
        description="exact: none of the choices in `searched` at this global batch is better; "
        "bounded: none is better by more than `gap`",
    )
    gap: float = Field(
        default=0.0, description="upper bound on how much better another can be, relative"
    )
    searched: SearchedChoices | None = None
    currency: str | None = Field(default=None, description="of prices, cost and budget")
    window_s: float | None = Field(
        default=None,
        description="time left in the daily windows of all its hosts when it was made; None: "
        "unlimited",
    )
    held: list[HeldDevice] | None = _HELD
    solve_time_s: float = Field(
        description="time until the plan was found, without alternatives and front"
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
    slips: bool = Field(description="whether it misses its deadline in this plan")
    devices: list[PlannedDevice]
    global_batch_size: int
    accumulation: int = Field(default=1, description="micro-batches per step of every rank")
    predicted: Prediction


class JointPlan(Value):
    """Several jobs on one pool: when each runs, and on which devices."""

    feasible: bool = Field(description="whether every job meets its deadline")
    objective: Literal["energy"] = "energy"
    jobs: list[ScheduledJob] = Field(description="in order of start")
    energy_j: float = Field(description="median, all jobs together")
    slips: list[str] = Field(default_factory=list, description="jobs that miss their deadline")
    late_alone: dict[str, str] = Field(
        default_factory=dict,
        description="those that would miss it even with all devices to themselves, with reasons",
    )
    held: list[HeldDevice] | None = _HELD
    search: Literal["exact", "bounded"] = Field(
        description="exact: all choices of devices and all orders were considered; bounded: not "
        "all. Does not apply to the delays of late jobs, which are found in steps"
    )
    gap: float | None = Field(
        default=0.0,
        description="bounded: upper bound on the share of energy that another plan can save; None "
        "if not all choices of devices were considered",
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
    """A short training at one learning rate, from the job's initial state."""

    learning_rate: float
    loss: float = Field(description="mean over its last quarter; infinite if it diverged")
    steps: int


class CurveFit(Value):
    """A curve fitted over x = log10(learning rate)."""

    curve: Literal["loss", "accuracy"]
    kind: Literal["polynomial", "logarithmic"]
    coefficients: list[float]
    low: float = Field(description="lowest learning rate of the fit")
    high: float = Field(description="highest learning rate of the fit")
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
        default_factory=list, description="in the order in which they ran"
    )
    diverged_at: float | None = None
    plot: str | None = None


class SplitEvent(Value):
    """The split from `step` on, and why it was recorded.

    The split changed, the global batch (its sum) changed, or other processes took over the same
    split.
    """

    step: int
    batch_sizes: list[int] = Field(description="by rank")
    reason: str


def split_since(events: Sequence[SplitEvent], planned: list[int]) -> int:
    """The step at which the final split began."""
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
        description="median, 5th and 95th percentile of its own work, measured"
    )
    wait_s: float = Field(description="time spent waiting for slower ranks")
    communication_s: float | None = Field(
        default=None,
        description="other time spent in sums over ranks; None: part of wait_s (earlier version)",
    )
    peak_memory_bytes: float
    cpu_s: float = Field(description="CPU time of its processes since the run started or resumed")
    share: str = Field(description="how its share of the CPU was enforced")


class Measured(Value):
    """The measured values that correspond to Prediction."""

    step_time_s: Interval | None
    duration_s: float
    peak_memory_bytes: float
    energy_j: float | None
    energy_source: str | None
    cost: float | None


class Confusion(Value):
    """Validation rows of one class that were predicted as another."""

    actual: str
    predicted: str
    rows: int


class ClassMetrics(Value):
    """A classification's validation by class; lists are in the order of `names`."""

    names: list[str]
    rows: list[int] = Field(description="validation rows of the class")
    precision: list[float]
    recall: list[float]
    f1: list[float]
    confusion: list[list[int]] = Field(
        description="rows by true class, then by predicted class; empty for more than 30 classes"
    )
    confused: list[Confusion] = Field(
        default_factory=list, description="the 20 most frequent confusions, most rows first"
    )
    auc_error: float | None = Field(
        default=None, description="greatest error of the metric `auc`, which is made from bins"
    )


class EarlyStop(Value):
    """Why a training ended before its last epoch."""

    epochs: int = Field(description="trained epochs")
    metric: str = Field(description="the validation metric that did not improve")
    best: float | None
    best_epoch: int = Field(description="the epoch, from 1, after which it was the best")
    reason: str


class Checkpoint(Value):
    """A checkpoint of the run folder."""

    path: str
    step: int
    metrics: dict[str, float] = Field(default_factory=dict)
    best: bool = False


class Result(Artefact):
    """result.json"""

    FILE: ClassVar[str] = "result.json"
    state: RunState
    metrics: dict[str, float] = Field(
        description="validation of the model that the step `store` stores"
    )
    model_step: int | None = Field(
        default=None,
        description="the checkpoint of that model, the best or the last; None: metrics are the "
        "last ones (earlier version)",
    )
    by_class: ClassMetrics | None = Field(
        default=None, description="figures by class of that validation, up to 100 classes"
    )
    early_stopped: EarlyStop | None = Field(
        default=None, description="if `train.early_stopping` ended the training"
    )
    target_reached: bool | None
    predicted: Prediction | None
    measured: Measured
    devices: list[DeviceResult]
    split_events: list[SplitEvent]
    checkpoints: list[Checkpoint]
    learning_rate: float
    global_batch_size: int = Field(description="as planned; may have grown (see split_events)")
    steps: int
    epochs: int
    noise_scale: float | None = Field(
        default=None, description="gradient noise scale at the end, in samples; None: not measured"
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
        description="the engine that computed the numbers: dask, or pandas if asked for"
    )
    epochs: list[dict[str, float | None]] = Field(description="loss and metrics by epoch")
    predicted_and_measured: list[dict[str, Any]]
    devices: list[dict[str, Any]]
    history: list[dict[str, Any]] = Field(
        description="this run, then its job's earlier runs, then other jobs'; newest first"
    )
