"""What the launcher asks of the ranks, and their results: plain values, serialised as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from trainwright.estimator.structure import LayerFacts
from trainwright.tasks.runs.artefacts.data_schema import DataSchema
from trainwright.tasks.runs.artefacts.layout import Layout, Pipeline, Stage
from trainwright.tasks.runs.artefacts.learning_rate_search import LearningRateTrial
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.runs.artefacts.training_result import SplitEvent
from trainwright.tasks.settings import Settings
from trainwright.tasks.spec.data_spec import DataSpec
from trainwright.tasks.spec.job import Job
from trainwright.tasks.storage.connect import open_store
from trainwright.tasks.storage.folder import FolderStore
from trainwright.tasks.storage.objects import ObjectStore


class TrainRequest(BaseModel):
    """A training that follows a plan."""

    model_config = ConfigDict(frozen=True)
    job: Job
    data: DataSpec | None = Field(
        default=None, description="the data on the ranks' machine; None: the job's data"
    )
    plan: Plan
    layers: list[LayerFacts] = Field(
        default_factory=list,
        description="the model's layers, for layouts that follow the plan's; empty: the plan's",
    )
    learning_rate: float
    schema_: DataSchema = Field(alias="schema")
    source_folder: str = Field(description="a local copy of the model's source")
    entry: str
    run_uri: str | None = Field(
        description="the store for checkpoints and metrics; None: only the work folder"
    )
    work_folder: str = Field(
        description="local folder for logs and events, and for all files if run_uri is None"
    )
    replay_events: list[SplitEvent] | None = Field(
        default=None, description="repeat exactly these split changes"
    )
    resume: bool = Field(default=True, description="start from the newest checkpoint if one exists")
    store_patience_s: float = Field(
        default=300.0,
        ge=0,
        description="how long the end of a training waits for an unreachable store",
    )

    settings: Settings = Field(
        default_factory=Settings,
        exclude=True,
        repr=False,
        description="this process's settings; never written to files, because they hold secrets",
    )

    @property
    def local_data(self) -> DataSpec:
        """The data that the ranks on this machine read."""
        return self.data or self.job.data

    @property
    def layout(self) -> Layout:
        """The plan's layout; that of data parallel for a plan without one."""
        return self.plan.layout or Layout(
            pipelines=[
                Pipeline(
                    micro_batches=[device.batch_size],
                    stages=[Stage(device=device.id, layers=[])],
                )
                for device in self.plan.devices
            ]
        )

    def layers_in(self, layout: Layout) -> list[LayerFacts]:
        """The layers of the model, as far as a layout needs to know them."""
        return self.plan.layers if layout == self.layout else self.layers or self.plan.layers

    def store(self, patience_s: float | None = None) -> ObjectStore:
        """The store for checkpoints and metrics; `patience_s` as in `open_store`."""
        if self.run_uri is None:
            return FolderStore(Path(self.work_folder))
        return open_store(self.run_uri, self.settings, patience_s=patience_s)


class Order(BaseModel):
    """The work of one launch of ranks."""

    model_config = ConfigDict(frozen=True)
    request: TrainRequest
    mode: Literal["train", "ramp"]
    backend: Literal["horovod", "torch"]
    learning_rates: list[float] = Field(
        default_factory=list, description="the ramp's rates, one per step"
    )
    trial_steps: int = Field(
        default=0, description="steps of each trial after the ramp; 0: no trials"
    )
    cgroups: list[str | None] = Field(
        default_factory=list, description="the cgroup that each rank joins"
    )
    launch: str | None = Field(
        default=None,
        description="the launch for which ranks on this machine stage checkpoints; None elsewhere",
    )
    sharded: bool = Field(
        default=True, description="whether each rank writes a shard of a large checkpoint"
    )
    started_at_s: float = Field(description="Unix time in seconds")
    earlier_s: float = Field(
        default=0.0, description="training time of earlier launches, in seconds"
    )

    @classmethod
    def read(cls, path: Path, settings: Settings) -> Order:
        """Read an order from a file, and give it this process's settings."""
        order = cls.model_validate_json(path.read_text())
        request = order.request.model_copy(update={"settings": settings})
        return order.model_copy(update={"request": request})


class RampPoint(BaseModel):
    """One step of the learning-rate ramp on the global batch, before the update."""

    model_config = ConfigDict(frozen=True)
    learning_rate: float
    loss: float
    accuracy: float | None = None


class Searched(BaseModel):
    """The points and trials of a learning-rate search."""

    model_config = ConfigDict(frozen=True)
    points: list[RampPoint]
    trials: list[LearningRateTrial]
    states: list[str] = Field(description="by rank: the hash of the restored state")
