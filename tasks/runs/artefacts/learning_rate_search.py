"""lr_search.json: the learning rate, and the ramp and trials by which it was chosen."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from trainwright.tasks.runs.artefacts.artefact import Artefact
from trainwright.tasks.runs.value import Value


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
