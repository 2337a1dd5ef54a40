"""lr_search.json: the learning rate, and the ramp and trials by which it was chosen."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from trainwright.tasks.runs.artefacts.artefact import Artefact
from trainwright.tasks.runs.value import Value


class LearningRatePoint(Value):
    """One step of the ramp."""

    learning_rate: float = Field(description="of the step")
    loss: float = Field(description="of the step")
    smoothed_loss: float = Field(description="over the last steps")
    accuracy: float | None = Field(default=None, description="of the step")
    smoothed_accuracy: float | None = Field(default=None, description="over the last steps")


class LearningRateTrial(Value):
    """A short training at one learning rate, from the job's initial state."""

    learning_rate: float = Field(description="of the trial")
    loss: float = Field(description="mean over its last quarter; infinite if it diverged")
    steps: int = Field(description="that it trained")


class CurveFit(Value):
    """A curve fitted over x = log10(learning rate)."""

    curve: Literal["loss", "accuracy"] = Field(description="loss or accuracy")
    kind: Literal["polynomial", "logarithmic"] = Field(description="polynomial or logarithm")
    coefficients: list[float] = Field(description="over log10 of the rate")
    low: float = Field(description="lowest learning rate of the fit")
    high: float = Field(description="highest learning rate of the fit")
    r2: float = Field(description="share of the variance that the fit explains")


class LearningRateSearch(Artefact):
    """lr_search.json; the plot is lr_search.html beside it."""

    FILE: ClassVar[str] = "lr_search.json"
    learning_rate: float = Field(description="the rate to train with")
    interval: tuple[float, float] = Field(description="in which the rate was looked for")
    source: Literal["searched", "given", "replayed"] = Field(description="who chose the rate")
    reason: str = Field(description="why this rate, in a sentence")
    points: list[LearningRatePoint] = Field(default_factory=list)
    fits: list[CurveFit] = Field(default_factory=list)
    trials: list[LearningRateTrial] = Field(
        default_factory=list, description="in the order in which they ran"
    )
    diverged_at: float | None = Field(
        default=None, description="rate of the ramp at which the loss diverged"
    )
    plot: str | None = Field(default=None, description="file of the plot")
