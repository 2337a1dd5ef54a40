"""Metrics of a validation, from sums that add up over batches and ranks.

Each rank adds its rows to a vector of sums; the metrics follow from the sum of all vectors. They
are those of the whole, however the rows were split: counts exactly, other sums up to rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch  # noqa: TID253 - only ranks import this

from trainwright.tasks.spec.metric_names import (
    MOST_CLASSES,
    MOST_CONFUSIONS,
    MOST_IN_MATRIX,
    metrics_of,
)

BINS = 4096
"""Bins of a class's scores, for its AUC."""
MOST_BINS = 1 << 16
"""Bins of all classes together: bounds the vector to about 1 MB."""
_HALF_WAY = 8.0
"""The score, as log-odds, in the middle of the upper half of the bins."""


@dataclass(frozen=True)
class ValidationMetrics:
    """Metrics by name, and figures by class (`by_class` of result.json, without names)."""

    metrics: dict[str, float] = field(default_factory=dict)
    by_class: dict[str, Any] = field(default_factory=dict)


class MetricSums(Protocol):
    """The sums of one task. Vectors of the same task and size may be added."""

    vector: torch.Tensor
    """float64; the first element is the number of rows"""

    def add(self, outputs: Any, targets: torch.Tensor) -> None:
        """Add rows. Outputs of a form that has no metrics are left out of the row count."""
        ...

    def found(self, rows: float) -> ValidationMetrics:
        """The metrics; none if the vector holds another number of rows than `rows`."""
        ...


def sums_of(
    task: str, classes: int, shift: float, device: torch.device, naive: float | None = None
) -> MetricSums | None:
    """Empty sums; None if the task has no metrics besides the loss.

    `shift`, `naive`: see QuantitySums.
    """
    if task.endswith("classification"):
        return ClassSums(classes, device) if classes else None
    return QuantitySums(shift, device, naive) if "rmse" in metrics_of(task) else None


class ClassSums:
    """Sums of a classification; outputs are logits, (rows, classes).

    Rows and log-loss; the confusion matrix with a last column for predictions that are no class,
    or for more than 100 classes only each class's rows, predictions and hits; two histograms of
    scores per class (of one class if there are two): rows of the class, and other rows.
    """

    def __init__(self, classes: int, device: torch.device | None = None) -> None:
        self.classes, self.detailed = classes, classes <= MOST_CLASSES
        self.scored = (1 if classes == 2 else classes) if self.detailed else 0
        self.bins = min(BINS, MOST_BINS // max(1, self.scored))
        self._counts = classes * (classes + 1 if self.detailed else 3)
        size = 2 + self._counts + 2 * self.scored * self.bins
        self.vector = torch.zeros(size, dtype=torch.float64, device=device)

    def add(self, outputs: Any, targets: torch.Tensor) -> None:
        """Add rows of logits and class numbers."""
        if (
            not isinstance(outputs, torch.Tensor)
            or outputs.ndim != 2
            or outputs.shape[1] < max(2, self.classes)
            or not outputs.is_floating_point()
        ):
            return
        logs = torch.log_softmax(outputs.detach().double(), dim=1)
        rows, predicted = len(targets), outputs.argmax(dim=1).clamp(max=self.classes)
        self.vector[0] += rows
        self.vector[1] -= logs.gather(1, targets[:, None]).sum()
        if self.detailed:
            self._count(targets * (self.classes + 1) + predicted)
            self._count(self._places(logs, targets).reshape(-1) + self._counts)
            return
        known, hits = predicted[predicted < self.classes], predicted[predicted == targets]
        for number, found in enumerate((targets, known, hits)):
            self._count(found + number * self.classes)

    def _count(self, places: torch.Tensor) -> None:
        ones = torch.ones(1, dtype=torch.float64, device=places.device).expand(len(places))
        self.vector[2:].scatter_add_(0, places, ones)

    def _places(self, logs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The bin of each row's score for each class, among the bins of all histograms.

        The score is the log-odds of the class's probability, which ranks rows as that does.
        """
        first = self.classes - self.scored
        own = logs[:, first : self.classes]
        odds = torch.nan_to_num(own - torch.log(-torch.expm1(own)), 0.0, 1e9, -1e9)
        bins = ((odds / (_HALF_WAY + odds.abs()) + 1) * (self.bins / 2)).long()
        numbers = torch.arange(self.scored, device=logs.device)
        histogram = 2 * numbers + (targets[:, None] != numbers + first).long()
        return bins.clamp(0, self.bins - 1) + histogram * self.bins

    def found(self, rows: float) -> ValidationMetrics:
        """Log-loss, accuracy, macro F1 and AUC, and precision, recall and F1 of each class.

        Macro F1 is the mean over the classes that occur or are predicted. AUC is that of the second
        class if there are two, else the mean over the classes that occur, each against the rest.
        """
        if not rows or float(self.vector[0]) != rows:
            return ValidationMetrics()
        values = self.vector.cpu()
        counts = values[2 : 2 + self._counts].reshape(-1, self.classes)
        confusion = None
        if self.detailed:
            table = counts.reshape(self.classes, self.classes + 1)
            confusion = table[:, : self.classes]
            counts = torch.stack([table.sum(1), confusion.sum(0), confusion.diagonal()])
        actual, predicted, hits = counts
        f1 = _ratio(2 * hits, actual + predicted)
        metrics = {
            "accuracy": float(hits.sum()) / rows,
            "f1": float(f1[actual + predicted > 0].mean()),
            "log_loss": float(values[1]) / rows,
        }
        if confusion is None:
            return ValidationMetrics(metrics)
        auc, error = self._auc(values[2 + self._counts :])
        by_class: dict[str, Any] = {
            "rows": [int(one) for one in actual],
            "precision": _ratio(hits, predicted).tolist(),
            "recall": _ratio(hits, actual).tolist(),
            "f1": f1.tolist(),
            "confusion": confusion.long().tolist() if self.classes <= MOST_IN_MATRIX else [],
            "confused": _confused(confusion),
        }
        if auc is None:
            return ValidationMetrics(metrics, by_class)
        return ValidationMetrics(metrics | {"auc": auc}, by_class | {"auc_error": error})

    def _auc(self, histograms: torch.Tensor) -> tuple[float | None, float]:
        """The AUC and its greatest error; None if no class has rows of both kinds.

        Σ_b p_b · (N_<b + n_b / 2) / (P · N) over bins b counts a pair in the same bin as half. The
        exact AUC counts it as 0, ½ or 1, so the error is at most Σ_b p_b · n_b / (2 · P · N).
        """
        own, other = histograms.reshape(-1, 2, self.bins).unbind(1)
        pairs = own.sum(1) * other.sum(1)
        known = pairs > 0
        if not known.any():
            return None, 0.0
        below = other.cumsum(1) - other
        areas = (own * (below + other / 2)).sum(1)[known] / pairs[known]
        errors = (own * other).sum(1)[known] / (2 * pairs[known])
        return float(areas.mean()), float(errors.mean())


class QuantitySums:
    """Sums of a regression or forecast: rows, values, errors and targets.

    Targets are counted from `shift`, the same value on all ranks and near the targets, so that the
    spread of large targets does not vanish in rounding.
    """

    def __init__(
        self, shift: float, device: torch.device | None = None, naive: float | None = None
    ) -> None:
        """`naive`: the scale of MASE (`naive_error`), if the task has it."""
        self.shift, self.naive = shift, naive
        self.vector = torch.zeros(6, dtype=torch.float64, device=device)

    def add(self, outputs: Any, targets: torch.Tensor) -> None:
        """Add rows of predictions and targets with equally many values."""
        if not isinstance(outputs, torch.Tensor) or outputs.numel() != targets.numel():
            return
        wanted = targets.double()
        off = outputs.detach().double().reshape(wanted.shape) - wanted
        wanted = wanted - self.shift
        sums = [off.abs().sum(), off.square().sum(), wanted.sum(), wanted.square().sum()]
        self.vector[0] += len(targets)
        self.vector[1] += targets.numel()
        self.vector[2:] += torch.stack(sums)

    def found(self, rows: float) -> ValidationMetrics:
        """RMSE, MAE and R² over all values. R² is 0 for constant targets, or 1 without error.

        MASE = MAE / `naive`, if that is more than 0 (R. Hyndman, A. Koehler, "Another look at
        measures of forecast accuracy", 2006).
        """
        counted, values, absolute, square, total, total_square = self.vector.tolist()
        if not values or counted != rows:
            return ValidationMetrics()
        spread = total_square - total**2 / values
        constant = spread <= 1e-14 * total_square
        r2 = (0.0 if square else 1.0) if constant else 1 - square / spread
        metrics = {"rmse": math.sqrt(square / values), "mae": absolute / values, "r2": r2}
        if self.naive:
            metrics["mase"] = metrics["mae"] / self.naive
        return ValidationMetrics(metrics)


def naive_error(last: torch.Tensor, following: torch.Tensor) -> float:
    """The mean absolute error of the naive forecast, which repeats the last known value.

    `last` has the last value of each history, `following` the first target after it.
    """
    return float((following.double() - last.double()).abs().mean())


def _confused(confusion: torch.Tensor) -> list[list[int]]:
    """The most frequent confusions: true class, predicted class, rows; most rows first."""
    wrong = confusion - confusion.diag().diag()
    order = wrong.reshape(-1).argsort(descending=True, stable=True)[:MOST_CONFUSIONS].tolist()
    pairs = [divmod(place, len(confusion)) for place in order]
    return [[own, other, int(wrong[own, other])] for own, other in pairs if wrong[own, other]]


def _ratio(above: torch.Tensor, below: torch.Tensor) -> torch.Tensor:
    """The quotients, 0 for a divisor of 0."""
    return torch.where(below > 0, above / below.clamp(min=1), 0.0)
