"""The accuracy of predictions: errors, their summary, the noise floor, tables. Loads no torch.

An error is relative and signed: e = predicted / measured - 1.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trainwright.estimator.quantiles import quantile


@dataclass(frozen=True)
class Accuracy:
    """A summary of `count` errors; 0.1 is 10 %.

    `bias` is the signed median. `coverage` is the share of cases inside their interval and `width`
    the median of high / low; both are None for a method without intervals. `noise_median` and
    `noise_p90` are the noise floor of the same measurements (None: not measured).
    """

    count: int
    median: float
    p90: float
    bias: float
    worst: float
    coverage: float | None = None
    width: float | None = None
    noise_median: float | None = None
    noise_p90: float | None = None

    def document(self) -> dict[str, Any]:
        """The summary as a JSON object."""
        return asdict(self)


def errors(predicted: Sequence[float], measured: Sequence[float]) -> list[float]:
    """predicted / measured - 1 for each pair."""
    return [one / seen - 1 for one, seen in zip(predicted, measured, strict=True)]


def noise_floor(rounds: Sequence[float]) -> float:
    """The error of a perfect predictor: |median of the first half / median of the second half - 1|.

    With an odd number of rounds, the middle one is in neither half. Raises ValueError for fewer
    than two rounds.
    """
    half = len(rounds) // 2
    if not half:
        raise ValueError(f"rounds: got {len(rounds)}; at least two are needed")
    return abs(statistics.median(rounds[:half]) / statistics.median(rounds[-half:]) - 1)


def coverage(intervals: Sequence[tuple[float, float]], measured: Sequence[float]) -> float:
    """The share of measurements inside their interval, ends included."""
    inside = [low <= seen <= high for (low, high), seen in zip(intervals, measured, strict=True)]
    return sum(inside) / len(inside)


def summarise(
    predicted: Sequence[float],
    measured: Sequence[float],
    *,
    noise: Sequence[float] = (),
    intervals: Sequence[tuple[float, float]] = (),
) -> Accuracy:
    """The accuracy of predictions, in any one unit.

    `noise` is the noise floor of each measurement, `intervals` are the predicted ones. Raises
    ValueError without predictions, or if the lengths differ.
    """
    off = errors(predicted, measured)
    size = [abs(one) for one in off]
    return Accuracy(
        count=len(off),
        median=quantile(size, 0.5),
        p90=quantile(size, 0.9),
        bias=quantile(off, 0.5),
        worst=max(off, key=abs),
        coverage=coverage(intervals, measured) if intervals else None,
        width=quantile([high / low for low, high in intervals], 0.5) if intervals else None,
        noise_median=quantile(noise, 0.5) if noise else None,
        noise_p90=quantile(noise, 0.9) if noise else None,
    )


def percent(value: float | None, *, signed: bool = False) -> str:
    """0.123 as '12.3 %'; None as a dash."""
    if value is None:
        return "-"
    return f"{100 * value:+.1f} %" if signed else f"{100 * value:.1f} %"


HEADER = ("method", "cases", "median", "p90", "bias", "worst", "in interval", "high / low")


def row(name: str, accuracy: Accuracy) -> tuple[str, ...]:
    """A method's row under `HEADER`."""
    return (
        name,
        str(accuracy.count),
        percent(accuracy.median),
        percent(accuracy.p90),
        percent(accuracy.bias, signed=True),
        percent(accuracy.worst, signed=True),
        percent(accuracy.coverage),
        "-" if accuracy.width is None else f"{accuracy.width:.2f}",
    )


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as text in aligned columns: the first to the left, the others to the right.

    The first row is the header.
    """
    widths = [max(len(one[place]) for one in rows) for place in range(len(rows[0]))]
    lines = []
    for number, one in enumerate(rows):
        cells = [
            text.ljust(width) if not place else text.rjust(width)
            for place, (text, width) in enumerate(zip(one, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
        if not number:
            lines.append("  ".join("-" * width for width in widths))
    return "\n".join(lines)
