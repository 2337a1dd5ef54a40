"""Charts of the report (bokeh): predictions, learning, devices, earlier runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainwright.tasks.plots.colours import BACK, BLUE, GREEN, GREY, HUES, LINE, MUTED, PURPLE, TEXT
from trainwright.tasks.spec.metric_names import SHARES
from trainwright.tasks.units import is_rough, is_unknown

if TYPE_CHECKING:
    import pandas as pd

_MOST_POINTS = 2000
_ERRORS = ("rmse", "mae")
_INITIALS = ("f1", "auc", *_ERRORS)
_LEFT, _LEFT_OF_NAMES, _RIGHT = 72, 200, 4
"""Pixels left of a plot for numbers, left of one for names of quantities, and right of a plot."""


def _figure(title: str, left: int = _LEFT, **options: Any) -> Any:
    from bokeh.plotting import figure

    tools = "pan,wheel_zoom,reset,hover"
    return framed(figure(title=title, height=300, tools=tools, **options), left)


def _with_legend(shown: Any, place: str) -> Any:
    """The plot with its legend inside, where the curves leave room."""
    shown.legend.location = place
    _in_colours(shown.legend)
    return shown


def _in_colours(legend: Any) -> None:
    legend.label_text_color, legend.border_line_color = TEXT, LINE
    legend.background_fill_color, legend.background_fill_alpha = BACK, 0.7


def framed(shown: Any, left: int = _LEFT) -> Any:
    """The plot in the page's width; its tools appear while the pointer is over it.

    `left`: pixels for the labels of its y axis. All plots end where tables do.
    """
    shown.sizing_mode = "stretch_width"
    shown.toolbar.logo = None
    shown.toolbar.autohide, shown.toolbar_inner = True, True
    shown.min_border_left, shown.min_border_right = left, _RIGHT
    shown.grid.grid_line_color = LINE
    shown.background_fill_color = shown.border_fill_color = shown.outline_line_color = None
    shown.title.text_font_size, shown.title.text_color = "14px", TEXT
    for axis in shown.axis:
        axis.axis_label_text_font_style = "normal"
        axis.axis_label_text_font_size = axis.major_label_text_font_size = "13px"
        axis.axis_label_text_color = axis.major_label_text_color = MUTED
        axis.minor_tick_line_color = None
        axis.axis_line_color = axis.major_tick_line_color = MUTED
    if shown.legend:
        _in_colours(shown.legend)
    return shown


def losses(epochs: list[dict[str, float | None]]) -> Any:
    """Losses by epoch, on a logarithmic scale if they are positive."""
    names = [name for name in ("train_loss", "loss") if any(row.get(name) for row in epochs)]
    values = [value for row in epochs for name in names if (value := row.get(name)) is not None]
    scale = "log" if values and min(values) > 0 else "linear"
    shown = _by_epoch("Loss by epoch", "loss", y_axis_type=scale)
    for name, colour in zip(names, (GREY, BLUE), strict=False):
        words = "training" if name == "train_loss" else "validation"
        _curve(shown, epochs, name, colour, words)
    return _with_legend(shown, "top_right") if names else shown


def validation_metrics(epochs: list[dict[str, float | None]]) -> Any:
    """The metrics that are shares, by epoch: accuracy, F1, AUC; else the errors of a regression.

    None without any.
    """
    shares = [name for name in SHARES if any(row.get(name) for row in epochs)]
    names = shares or [name for name in _ERRORS if any(row.get(name) for row in epochs)]
    if not names:
        return None
    shown = _by_epoch("Validation by epoch", "share" if shares else "error")
    _grouped(shown.yaxis)
    for name, colour in zip(names, (GREEN, BLUE, PURPLE), strict=False):
        dash = "dashed" if name == "f1" else "solid"  # it may cover the accuracy
        _curve(shown, epochs, name, colour, _words(name), dash)
    return _with_legend(shown, "bottom_right" if shares else "top_right")


def _words(metric: str) -> str:
    return metric.upper() if metric in _INITIALS else metric.replace("_", " ")


def _by_epoch(title: str, what: str, **options: Any) -> Any:
    shown = _figure(title, x_axis_label="epoch", y_axis_label=what, **options)
    _whole(shown.xaxis)
    return shown


def _whole(axis: Any) -> None:
    """Ticks at whole numbers only."""
    from bokeh.models import BasicTicker

    axis.ticker = BasicTicker(min_interval=1)


def _grouped(axis: Any) -> None:
    """Tick labels such as 24,000 and 0.925."""
    from bokeh.models import NumeralTickFormatter

    axis.formatter = NumeralTickFormatter(format="0,0.[0000]")


def _curve(
    shown: Any,
    epochs: list[dict[str, float | None]],
    name: str,
    colour: str,
    words: str,
    dash: str = "solid",
) -> None:
    x = [None if (epoch := row["epoch"]) is None else epoch + 1 for row in epochs]
    values = [row.get(name) for row in epochs]
    shown.line(x, values, color=colour, width=2, line_dash=dash, legend_label=words)


def ratios(rows: list[dict[str, Any]]) -> Any:
    """Each prediction, with its interval, as a multiple of the measured value; 1 is exact."""
    from bokeh.models import Span

    known = [
        row
        for row in rows[::-1]
        if row["measured"] and row["predicted"] and not is_unknown(row["low"], row["high"])
    ]
    names = [row["quantity"] for row in known]
    # Memory has only an upper bound.
    spans = [
        [value / row["measured"] for value in (row["low"] or row["predicted"], row["high"])]
        for row in known
    ]
    medians = [row["predicted"] / row["measured"] for row in known]
    sharp = [
        end
        for row, span in zip(known, spans, strict=True)
        if not is_rough(row["low"], row["high"])
        for end in span
    ]
    shown_values = [1.0, *medians, *sharp]
    shown = _figure(
        "Predicted, as a multiple of measured",
        left=_LEFT_OF_NAMES,
        y_range=names,
        x_range=(min(shown_values) / 1.2, max(shown_values) * 1.2),
        x_axis_type="log",
        x_axis_label="predicted / measured; a rough interval may go beyond the plot",
    )
    shown.height = 90 + 26 * len(names)
    lows, highs = ([span[end] for span in spans] for end in (0, 1))
    shown.segment(lows, names, highs, names, color=GREY, line_width=3)
    shown.scatter(medians, names, color=BLUE, size=8)
    _grouped(shown.xaxis)
    shown.add_layout(Span(location=1, dimension="height", line_color=GREEN, line_width=1))
    return shown


def step_times(steps: pd.DataFrame) -> Any:
    shown = _figure(
        "Own work of each device in a step, without waiting",
        x_axis_label="step",
        y_axis_label="own work, ms",
    )
    highest = 0.0
    for place, (device, rows) in enumerate(steps.groupby("device", sort=False)):
        thin = rows.iloc[:: max(1, len(rows) // _MOST_POINTS)]
        times = (thin["compute_s"] * 1e3).tolist()
        highest = max(highest, float((rows["compute_s"] * 1e3).quantile(0.98)))
        colour = HUES[place % len(HUES)]
        shown.scatter(
            thin["step"].tolist(), times, size=3, color=colour, alpha=0.6, legend_label=str(device)
        )
    shown.y_range.start, shown.y_range.end = 0, highest * 1.3
    return _with_legend(shown, "top_right")


def results(rows: list[dict[str, Any]], metric: str) -> Any:
    """The metric of this job's runs."""
    words = _words(metric)
    shown = _figure(
        f"{words[0].upper()}{words[1:]} of this job's runs",
        x_axis_label="run, oldest first",
        y_axis_label=words,
    )
    _whole(shown.xaxis)
    _grouped(shown.yaxis)
    x = list(range(1, len(rows) + 1))
    shown.line(x, [row["result"] for row in rows], color=BLUE, width=1)
    shown.scatter(x, [row["result"] for row in rows], color=BLUE, size=7)
    return shown
