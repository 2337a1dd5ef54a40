"""Plots the learning-rate search, as a page of its own and as charts for the report (bokeh)."""

from __future__ import annotations

import math
from typing import Any

from trainwright.tasks.plots.colours import BLUE, GREEN, GREY, PINK
from trainwright.tasks.runs.artefacts.learning_rate_search import LearningRateSearch


def plot(search: LearningRateSearch) -> str:
    """The search as a self-contained HTML page: raw and smoothed curves, fits, interval, choice."""
    from bokeh.embed import file_html
    from bokeh.layouts import column
    from bokeh.resources import INLINE

    charts = [
        chart(search, curve)
        for curve in ("loss", "accuracy")
        if any(fit.curve == curve for fit in search.fits)
    ]
    return str(
        file_html(column(*charts or [chart(search, "loss")]), INLINE, title="Learning-rate search")
    )


def chart(search: LearningRateSearch, curve: str) -> Any:
    """One curve of the ramp (`loss` or `accuracy`) as a bokeh figure."""
    import numpy as np
    from bokeh.models import BoxAnnotation, Span
    from bokeh.plotting import figure

    shown = figure(
        title=f"Training {curve} while the learning rate rises",
        x_axis_type="log",
        width=760,
        height=320,
        x_axis_label="learning rate",
        y_axis_label=curve,
        tools="pan,wheel_zoom,reset,hover",
    )
    x = [point.learning_rate for point in search.points]
    shown.scatter(
        x,
        [getattr(point, curve) for point in search.points],
        size=4,
        color=GREY,
        legend_label="each step",
    )
    shown.line(
        x,
        [getattr(point, f"smoothed_{curve}") for point in search.points],
        width=2,
        color=BLUE,
        legend_label="smoothed",
    )
    for fit in search.fits:
        if fit.curve == curve:
            along = np.logspace(math.log10(fit.low), math.log10(fit.high), 120)
            dash = "solid" if fit.kind == "polynomial" else "dashed"
            shown.line(
                along,
                np.polyval(fit.coefficients, np.log10(along)),
                color=PINK,
                line_dash=dash,
                width=1.5,
                legend_label=fit.kind,
            )
    tried = [one for one in search.trials if math.isfinite(one.loss)] if curve == "loss" else []
    if tried:
        shown.scatter(
            [one.learning_rate for one in tried],
            [one.loss for one in tried],
            size=9,
            marker="diamond",
            color=GREEN,
            legend_label="trials",
        )
    low, high = search.interval
    shown.add_layout(BoxAnnotation(left=low, right=high, fill_alpha=0.12, fill_color=GREEN))
    shown.add_layout(
        Span(location=search.learning_rate, dimension="height", line_color=GREEN, line_width=2)
    )
    smoothed = [getattr(point, f"smoothed_{curve}") for point in search.points]
    middle = smoothed[: max(1, len(smoothed) * 9 // 10)]
    middle += [one.loss for one in tried]
    span = (max(middle) - min(middle)) or 1.0
    shown.y_range.start, shown.y_range.end = min(middle) - 0.1 * span, max(middle) + 0.3 * span
    shown.legend.location = "bottom_left" if curve == "loss" else "top_left"
    shown.legend.background_fill_alpha = 0.7
    shown.toolbar.logo, shown.toolbar.autohide = None, True
    return shown
