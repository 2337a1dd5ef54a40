"""The validation metrics that a job may name: which task has which, and which way each improves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, get_args

Metric = Literal["accuracy", "loss", "f1", "auc", "log_loss", "rmse", "mae", "r2", "mase"]
METRICS: tuple[Metric, ...] = get_args(Metric)
MOST_CLASSES = 100
"""With more classes there is no AUC and no table by class."""
MOST_IN_MATRIX = 30
"""With more classes, the most frequent confusions replace the confusion matrix."""
MOST_CONFUSIONS = 20
SHARES = ("accuracy", "f1", "auc")
"""Metrics from 0 to 1."""
_FIRST = ("accuracy", "f1", "auc", "rmse", "mae")
_LESS_IS_BETTER = ("loss", "error", "mae", "mase", "mse", "rmse", "mape", "perplexity")


def metrics_of(task: str, classes: int | None = None) -> tuple[Metric, ...]:
    """The metrics of a task. `classes`: the number of classes, if known."""
    if task.endswith("classification"):
        if classes is not None and classes > MOST_CLASSES:
            return ("accuracy", "loss", "f1", "log_loss")
        return ("accuracy", "loss", "f1", "auc", "log_loss")
    if task == "forecasting":
        return ("loss", "rmse", "mae", "r2", "mase")
    if task == "tabular-regression":
        return ("loss", "rmse", "mae", "r2")
    return ("loss",)


def leading_metric(metrics: Mapping[str, float], target: str | None = None) -> str | None:
    """The metric that stands for a model: the target's, else the first of those people ask for.

    A loss does if there is no other; None without any.
    """
    wanted = (target, *_FIRST, *(name for name in metrics if "loss" not in name), "loss")
    return next((name for name in wanted if name is not None and name in metrics), None)


def worsening(metric: str, before: float, after: float) -> float:
    """How much worse a metric is: the difference of a score, the relative rise of an error."""
    if better_is(metric) == "greater":
        return before - after
    return (after - before) / abs(before) if before else (math.inf if after > before else 0.0)


def better_is(metric: str) -> Literal["greater", "less"]:
    """The direction in which a metric improves, from its name: losses and errors fall."""
    words = metric.lower().replace("-", "_").split("_")
    return "less" if any(word in _LESS_IS_BETTER for word in words) else "greater"


def shown_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics for people: names in words, losses last, no log loss that is the loss itself."""
    loss = metrics.get("loss")
    names = [
        name
        for name, value in metrics.items()
        if name != "log_loss" or loss is None or not math.isclose(value, loss, rel_tol=1e-3)
    ]
    names.sort(key=lambda name: "loss" in name)
    return {name.replace("_", " "): metrics[name] for name in names}
