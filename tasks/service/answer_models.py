"""Models of the answers that are not artefacts: the documents that the command line prints."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from trainwright.estimator.curves import Interval, Mode
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.runs.artefacts.recommendation import Recommendation
from trainwright.tasks.runs.listing import RunRow
from trainwright.tasks.spec.pool import Device, PoolEngine
from trainwright.tasks.trained_with import UsedField
from trainwright.tasks.verdicts import Verdict


class Memory(BaseModel):
    """Memory that a step needs, in bytes."""

    expected: float
    safe: float


class StepEstimate(BaseModel):
    """`trainwright estimate --json`"""

    device_type: str
    batch_size: int
    mode: Mode
    coverage: float
    learned_from: int
    unknown_operations: list[str]
    step_time_s: Interval
    peak_memory_bytes: Memory
    process_bytes: float | None
    device_memory_bytes: float
    memory_limit_bytes: float | None
    energy_j: Interval | None
    energy_source: Literal["measured", "datasheet"] | None


class PlanAnswer(Plan):
    """plan.json"""


class Problem(BaseModel, extra="allow"):
    """An error: `kind` for programs, `message` for people, one line."""

    kind: str
    message: str


class ErrorAnswer(BaseModel, extra="allow"):
    """An error, as the command line prints it with --json."""

    error: Problem


class Infeasibility(BaseModel):
    """No plan meets the limits: `error` says which one binds and the nearest feasible one."""

    error: Problem
    feasible: Literal[False]


class RecommendationAnswer(Recommendation):
    """`trainwright recommend --json`"""

    job: str
    source: None
    source_text: str


class DeviceState(Device):
    """A device, its availability and its holder."""

    available: str | None
    available_now: bool
    available_changes_at: str | None
    holder: str | None
    run: str | None
    until: str | None
    expires_in_s: float | None
    revoked_by: str | None


class Waiting(BaseModel):
    """A run that waits for devices of the pool."""

    place: int
    run: str
    holder: str
    priority: int
    waited_s: float
    needed: int
    wanted: list[str]


class WaitingHost(BaseModel):
    """A host that a run waits for in a cluster's queue."""

    run: str
    holder: str | None
    host: str
    reported_at: str
    message: str


class ClusterNode(BaseModel):
    """A node of a cluster, as the cluster says."""

    name: str
    state: str
    partitions: list[str]
    cpus: int
    cpus_allocated: int
    memory_mib: int
    gpus: list[tuple[str, int]]


class ClusterState(BaseModel):
    """The nodes that a pool may ask for, as its cluster said within a minute; or why not known."""

    engine: PoolEngine
    nodes: list[ClusterNode] | None
    unknown: str


class PoolState(BaseModel):
    """`trainwright pool --json`, and hosts in a cluster's queue."""

    pool: str
    engine: PoolEngine
    devices: list[DeviceState]
    queue: list[Waiting]
    waiting_hosts: list[WaitingHost]
    cluster: ClusterState | None


class ServedNames(BaseModel):
    """The pools, models and layouts that a request may name."""

    pools: list[str]
    models: list[str]
    layouts: list[str]


class RunDocument(BaseModel, extra="allow"):
    """`trainwright show --json`, with the run's documents and events."""

    run: str
    id: str
    job: str
    state: str
    step: str | None
    updated_at: str
    job_file: dict[str, Any]
    job_used: dict[str, Any]
    waiting: dict[str, Any] | None
    failures: list[dict[str, Any]]
    verdicts: list[Verdict]
    trained_with: list[UsedField]
    plan: Plan | None
    result: dict[str, Any] | None
    predicted_and_measured: list[dict[str, Any]]
    exports: list[dict[str, Any]]
    events: list[dict[str, Any]]


class TrainingProgress(BaseModel):
    """How far a training is; `left_s` at the pace of its latest epochs."""

    step: int
    steps: int
    epoch: int
    epochs: int
    share: float
    left_s: float | None


class Recorded(BaseModel):
    """The recorded rows of a run (`live.recorded`)."""

    rows: list[dict[str, Any]]
    newest: list[dict[str, Any]]
    epochs: list[dict[str, Any]]
    splits: list[dict[str, Any]]
    stride: int
    next_step: int
    progress: TrainingProgress | None


class Opened(BaseModel):
    """The path of a TensorBoard, relative to the service."""

    path: str


class JobOutcomes(BaseModel):
    """The outcomes of a job's runs."""

    job: str
    runs: int
    succeeded: int
    failed: int
    running: int
    median_duration_s: float | None
    median_energy_j: float | None
    median_duration_error: float | None
    best_accuracy: float | None
    best_metric: str | None
    best: float | None
    newest: str


class History(BaseModel):
    """The outcomes of each job, and the finished runs, oldest first."""

    jobs: list[JobOutcomes]
    runs: list[RunRow]


class DeviceKind(BaseModel):
    """A device type, by its datasheet."""

    name: str
    peak_flops: dict[str, float]
    bandwidth_bytes_per_s: float
    memory_bytes: float | None
    idle_w: float
    load_w: float
    source: str
    other_sources: dict[str, str]
    link: str | None
    link_bytes_per_s: float | None
    sources: dict[str, str]


class DeviceTypes(BaseModel):
    """The known device types."""

    devices: list[DeviceKind]
