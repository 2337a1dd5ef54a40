"""result.json: what a training reached and used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from trainwright.estimator.curves import Interval
from trainwright.tasks.runs.artefacts.artefact import Artefact
from trainwright.tasks.runs.artefacts.layout import Layout
from trainwright.tasks.runs.artefacts.plan import Prediction
from trainwright.tasks.runs.artefacts.run_status import RunState
from trainwright.tasks.runs.artefacts.step_kinds import StepByKind
from trainwright.tasks.runs.value import Value


class GroupAverage(Value):
    """An average of ranks that trained alone, when their group changed or the training stopped.

    Numbers are those of devices in the plan.
    """

    by: list[int] = Field(
        description="the devices whose work since the last average counts; all continued from the "
        "state of the first"
    )
    after: int = Field(description="the averages between the last finished step and this one")
    unfinished: dict[int, int] = Field(
        default_factory=dict,
        description="by device: its updates in a step that had not ended, and was done again",
    )


class SplitEvent(Value):
    """The split from `step` on, and why it was recorded.

    The split changed, the global batch (its sum) changed, the layout changed, other processes
    took over the same split, or ranks averaged their parameters for another reason than the
    layout's interval.
    """

    step: int = Field(description="before which it happened")
    batch_sizes: list[int] = Field(description="by rank")
    reason: str = Field(description="for people")
    layout: Layout | None = Field(
        default=None, description="the layout from this step on, if it changed"
    )
    averaged: GroupAverage | None = Field(
        default=None, description="the average before this step, with layouts that average"
    )


def layout_since(events: Sequence[SplitEvent], planned: Layout) -> Layout:
    """The layout after these events."""
    return next((one.layout for one in reversed(events) if one.layout is not None), planned)


def split_since(events: Sequence[SplitEvent], planned: list[int]) -> int:
    """The step at which the final split began."""
    since, split = 0, planned
    for event in events:
        if event.batch_sizes != split:
            since, split = event.step, event.batch_sizes
    return since


class DeviceResult(Value):
    """What one device did."""

    id: str = Field(description="of the device")
    type: str = Field(description="of the device")
    rank: int = Field(description="its number")
    batch_size: int = Field(description="at the end")
    samples: int = Field(description="on which it trained")
    step_time_s: Interval | None = Field(
        description="median, 5th and 95th percentile of its own work, measured"
    )
    wait_s: float = Field(description="time spent waiting for slower ranks")
    communication_s: float | None = Field(
        default=None,
        description="other time spent in sums over ranks; None: part of wait_s (earlier version)",
    )
    peak_memory_bytes: float = Field(description="of its process")
    cpu_s: float = Field(description="CPU time of its processes since the run started or resumed")
    share: str = Field(description="how its share of the CPU was enforced")
    image: str = Field(default="", description="id of its image; empty outside containers")


class Measured(Value):
    """The measured values that correspond to Prediction."""

    step_time_s: Interval | None
    duration_s: float = Field(description="of the training")
    peak_memory_bytes: float = Field(description="the largest of all ranks")
    energy_j: float | None = Field(description="of all devices")
    energy_source: str | None = Field(description="measured, or datasheet")
    cost: float | None = Field(description="in the pool's currency")
    by_kind: list[StepByKind] = Field(
        default_factory=list,
        description="by device: the median of up to 512 latest steps; of what fewer than half of "
        "them do, the mean. Empty: an earlier version",
    )


class Confusion(Value):
    """Validation rows of one class that were predicted as another."""

    actual: str = Field(description="class of the rows")
    predicted: str = Field(description="class that the model gave")
    rows: int = Field(description="how many")


class ClassMetrics(Value):
    """A classification's validation by class; lists are in the order of `names`."""

    names: list[str] = Field(description="of the classes")
    rows: list[int] = Field(description="validation rows of the class")
    precision: list[float] = Field(description="of each class")
    recall: list[float] = Field(description="of each class")
    f1: list[float] = Field(description="of each class")
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
    best: float | None = Field(description="the metric's best value")
    best_epoch: int = Field(description="the epoch, from 1, after which it was the best")
    reason: str = Field(description="for people")


class Checkpoint(Value):
    """A checkpoint of the run folder."""

    path: str = Field(description="in the run's folder")
    step: int = Field(description="after which it was written")
    metrics: dict[str, float] = Field(
        default_factory=dict, description="on the validation rows, if there were some"
    )
    best: bool = Field(default=False, description="whether it is the best one")


class Result(Artefact):
    """result.json"""

    FILE: ClassVar[str] = "result.json"
    state: RunState = Field(description="how training ended")
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
    target_reached: bool | None = Field(
        description="whether the job's target was; None: the job has none"
    )
    predicted: Prediction | None
    measured: Measured
    devices: list[DeviceResult]
    split_events: list[SplitEvent]
    checkpoints: list[Checkpoint]
    learning_rate: float = Field(description="with which it trained")
    global_batch_size: int = Field(description="as planned; may have grown (see split_events)")
    steps: int = Field(description="that it trained")
    epochs: int = Field(description="that it trained")
    noise_scale: float | None = Field(
        default=None, description="gradient noise scale at the end, in samples; None: not measured"
    )
    resumed_from_step: int | None = Field(
        description="step of the checkpoint from which it went on"
    )
    backend: str = Field(description="horovod or torch")
    versions: dict[str, str] = Field(description="of Python and packages")

    @property
    def model_in_words(self) -> str | None:
        """Where in the training the stored model was, as in `epoch 8 of 20`; None: not known.

        Its step, if epochs had different numbers of steps.
        """
        if self.model_step is None or not self.steps:
            return None
        epoch, rest = divmod(self.model_step * self.epochs, self.steps)
        whole = rest == 0 and epoch > 0
        return (
            f"epoch {epoch} of {self.epochs}"
            if whole
            else f"step {self.model_step} of {self.steps}"
        )
