"""recommendation.json: which models suit a run's data, and why. The first is the run's model."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from trainwright.estimator.curves import Interval
from trainwright.tasks.runs.artefacts.artefact import Artefact
from trainwright.tasks.runs.value import Value
from trainwright.tasks.spec.data_spec import Task
from trainwright.tasks.spec.job import Scalar
from trainwright.tasks.spec.metric_names import Metric


class Candidate(Value):
    """A model for the data: a template in one size."""

    name: str = Field(description="template and size")
    template: str = Field(description="the family of models")
    size: str = Field(description="small, medium or large")
    config: dict[str, Scalar] = Field(description="arguments of build_model, its defaults")
    recipe: dict[str, Any] = Field(
        description="fields of the job, by dotted name, with which it is trained unless the user "
        "set them"
    )
    parameters: int = Field(description="numbers in the model")
    predicted_metric: Interval | None = Field(
        description="on the validation rows, with its 80 % interval; None: no benchmark compares"
    )
    probed_metric: float | None = Field(
        default=None,
        description="reached on the validation rows in a comparison; None: not compared",
    )
    feasible: bool = Field(description="whether a plan keeps the job's limits")
    duration_s: Interval | None = Field(description="of training, by the best plan")
    energy_j: Interval | None = None
    cost: Interval | None = Field(default=None, description="in the pool's currency")
    least_deadline_s: float | None = Field(
        default=None, description="the nearest feasible deadline, if no plan keeps the job's"
    )
    why: str = Field(description="the reason for its place")


class BoostedTrees(Value):
    """Gradient-boosted trees, trained on a sample as a reference."""

    library: str = Field(description="LightGBM, or scikit-learn if that is not installed")
    metric: float = Field(description="on validation rows")
    rows: int = Field(description="training rows of the sample")
    train_rows: int | None = Field(
        default=None, description="all training rows; None: of an earlier release"
    )
    duration_s: float = Field(description="of their training")


class Recommendation(Artefact):
    """recommendation.json"""

    FILE: ClassVar[str] = "recommendation.json"
    task: Task = Field(description="the kind of learning task")
    metric: Metric | None = Field(
        default=None, description="the metric of the predictions; None: the task has none"
    )
    candidates: list[Candidate] = Field(
        default_factory=list, description="ranked, best first; those that miss a limit come last"
    )
    chosen: str | None = Field(description="name of the first candidate; None: see `reason`")
    reason: str = Field(description="why it was chosen, or why none is")
    recipe: dict[str, Any] = Field(
        default_factory=dict, description="the chosen candidate's fields of the job"
    )
    figures: dict[str, float] = Field(
        default_factory=dict, description="figures of the data by which it is compared with others"
    )
    neighbours: list[str] = Field(
        default_factory=list,
        description="the most similar data sets of the benchmark, nearest first",
    )
    reference: BoostedTrees | None = Field(
        default=None, description="None: the data is no table, or has very many classes"
    )
    notes: list[str] = Field(
        default_factory=list, description="what a user should know, a sentence each"
    )
    origin: Literal["given", "recommended"] = Field(
        default="recommended", description="who chose the model"
    )
