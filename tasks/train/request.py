"""What the launcher asks of the ranks, and what they answer: plain values, as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from trainwright.tasks.runs.artefacts import DataSchema, LearningRateTrial, Plan, SplitEvent
from trainwright.tasks.settings import Settings
from trainwright.tasks.spec.job import DataSpec, Job
from trainwright.tasks.storage.connect import open_store
from trainwright.tasks.storage.folder import FolderStore
from trainwright.tasks.storage.objects import ObjectStore


class TrainRequest(BaseModel):
    """A training to be done by a plan."""

    model_config = ConfigDict(frozen=True)
    job: Job
    data: DataSpec | None = Field(
        default=None, description="the data on the ranks' machine; None: where the job says"
    )
    plan: Plan
    learning_rate: float
    schema_: DataSchema = Field(alias="schema")
    source_folder: str = Field(description="a local copy of the model's source")
    entry: str
    run_uri: str | None = Field(
        description="where checkpoints and metrics go; None: to the work folder only"
    )
    work_folder: str = Field(
        description="local: logs, events; and all the rest where run_uri is None"
    )
    replay_events: list[SplitEvent] | None = Field(
        default=None, description="change the split just so, and not otherwise"
    )
    resume: bool = Field(
        default=True, description="from the newest checkpoint, where there is one; else anew"
    )
    store_patience_s: float = Field(
        default=300.0,
        ge=0,
        description="how long the end of a training waits for a store that is away",
    )

    settings: Settings = Field(
        default_factory=Settings,
        exclude=True,
        repr=False,
        description="of this process; no file has them, for they hold secrets",
    )

    @property
    def local_data(self) -> DataSpec:
        """The data as the ranks of one machine read it."""
        return self.data or self.job.data

    def store(self, patience_s: float | None = None) -> ObjectStore:
        """Where what is kept goes; `patience_s` as in `open_store`."""
        if self.run_uri is None:
            return FolderStore(Path(self.work_folder))
        return open_store(self.run_uri, self.settings, patience_s=patience_s)


class Order(BaseModel):
    """What one launch of ranks is to do."""

    model_config = ConfigDict(frozen=True)
    request: TrainRequest
    mode: Literal["train", "ramp"]
    backend: Literal["horovod", "torch"]
    learning_rates: list[float] = Field(default_factory=list, description="of the ramp, one a step")
    trial_steps: int = Field(default=0, description="of each trial after the ramp; 0: no trials")
    cgroups: list[str | None] = Field(default_factory=list, description="what each rank joins")
    launch: str | None = Field(
        default=None,
        description="in whose name ranks of this machine stage checkpoints; None on another host",
    )
    sharded: bool = Field(
        default=True, description="whether each rank writes a shard of a large checkpoint"
    )
    started_at_s: float = Field(description="seconds since 1970")
    earlier_s: float = Field(default=0.0, description="how long earlier launches have trained")

    @classmethod
    def read(cls, path: Path, settings: Settings) -> Order:
        """The order in a file, to be carried out with a process's own settings."""
        order = cls.model_validate_json(path.read_text())
        request = order.request.model_copy(update={"settings": settings})
        return order.model_copy(update={"request": request})


class RampPoint(BaseModel):
    """One step of the learning-rate ramp, on the joint global batch, before the update."""

    model_config = ConfigDict(frozen=True)
    learning_rate: float
    loss: float
    accuracy: float | None = None


class Searched(BaseModel):
    """What a learning-rate search saw."""

    model_config = ConfigDict(frozen=True)
    points: list[RampPoint]
    trials: list[LearningRateTrial]
    states: list[str] = Field(description="by rank: the hash of what was the same before and after")
