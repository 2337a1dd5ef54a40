"""Renders the report of a run: one self-contained HTML page with tables and bokeh charts."""

from __future__ import annotations

from collections import Counter
from html import escape
from typing import TYPE_CHECKING, Any

from trainwright.tasks.analyze.exports_section import exports_section
from trainwright.tasks.analyze.report_tables import by_class, early_stop, recommended
from trainwright.tasks.html_page import STYLE, html_page, table, tiles
from trainwright.tasks.runs.artefacts.learning_rate_search import LearningRateSearch
from trainwright.tasks.runs.artefacts.recommendation import Recommendation
from trainwright.tasks.runs.artefacts.report_figures import Report
from trainwright.tasks.runs.artefacts.training_result import Result
from trainwright.tasks.runs.artefacts.validation import Validation
from trainwright.tasks.runs.run import Run
from trainwright.tasks.search_lr.plot import chart as ramp_chart
from trainwright.tasks.units import amount, plain, seconds, size
from trainwright.tasks.validate.rejection_page import drift_section, warning_section

if TYPE_CHECKING:
    import pandas as pd

_COLOURS = ("#1f77b4", "#d1495b", "#2a9d8f", "#edae49", "#6a4c93", "#8d99ae")
_MOST_POINTS = 2000
_BORDERS = (190, 60)
"""Pixels left and right of a plot, for the longest labels of an axis."""


def page(
    run: Run,
    report: Report,
    result: Result,
    search: LearningRateSearch | None,
    validation: Validation | None,
    steps: pd.DataFrame,
    recommendation: Recommendation | None = None,
    layout: str = "",
) -> str:
    """The page. All names that users chose are escaped; `layout` is HTML (`layout_section`)."""
    from bokeh.embed import components
    from bokeh.resources import Resources

    charts: dict[str, Any] = {}
    if any(row["measured"] for row in report.predicted_and_measured):
        charts["predicted"] = _ratios(report.predicted_and_measured)
    if report.epochs:
        charts["epochs"] = _epochs(report.epochs)
    if len(steps):
        charts["steps"] = _step_times(steps)
    if search is not None and search.points:
        charts["ramp"] = _framed(ramp_chart(search, "loss"))
    history = [
        row for row in report.history if row["accuracy"] is not None and row["job"] == run.job_name
    ]
    if len(history) > 1:
        charts["history"] = _history(history[::-1])
    script, places = components(charts) if charts else ("", {})
    chart = {name: f'<div class="wide chart">{place}</div>' for name, place in places.items()}
    sections = [
        f"<h1>{escape(run.job_name)}</h1><p>{escape(run.uri)}</p>",
        _tiles(result),
        "<h2>Predicted and measured</h2>" + _predicted(report) + chart.get("predicted", ""),
        "<h2>Learning</h2>" + early_stop(result.early_stopped) + chart.get("epochs", ""),
        by_class(result.by_class) if result.by_class is not None else "",
        "<h2>Devices</h2>" + _devices(report) + chart.get("steps", "") + _splits(result),
        layout,
        recommended(recommendation),
        _learning_rate(search, chart.get("ramp", "")),
        _data(validation),
        exports_section(run),
        f"<h2>Compared with {report.runs_compared} earlier run(s)</h2>",
        _incomplete(report) + chart.get("history", "") + _runs(report),
    ]
    head = str(Resources(mode="inline", components=["bokeh"]).render())
    return html_page(f"{run.job_name} {run.id}", "".join(sections) + script, head)


def is_report(content: bytes) -> bool:
    """Whether a file's content is a report."""
    return b"</title><style>" + STYLE[:16].encode() in content[:10_000]


def _percent(value: float | None, sign: bool = False) -> str:
    return "–" if value is None else f"{round(100 * value):{'+' if sign else ''}d} %"


def _tiles(result: Result) -> str:
    found = [(f"{value:.4f}", name.replace("_", " ")) for name, value in result.metrics.items()]
    found += [
        (seconds(result.measured.duration_s), "training, from start to end"),
        (
            amount(result.measured.energy_j, "J"),
            f"energy ({result.measured.energy_source or 'unknown'})",
        ),
        (f"{result.learning_rate:.2g}", "learning rate"),
        (str(result.global_batch_size), "global batch"),
        (f"{result.steps:,}", "steps"),
    ]
    return tiles(found)


def _quantity(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    return (
        seconds(value)
        if unit == "s"
        else size(value)
        if unit == "B"
        else amount(value, unit)
        if unit == "J"
        else f"{plain(value)} {unit}".rstrip()
    )


def _predicted(report: Report) -> str:
    rows = []
    for row in report.predicted_and_measured:
        inside = (
            "–"
            if row["inside"] is None
            else '<span class="good">inside</span>'
            if row["inside"]
            else '<span class="bad">outside</span>'
        )
        interval = f"{_quantity(row['low'], row['unit'])} to {_quantity(row['high'], row['unit'])}"
        if row["unit"] == "B":
            interval = f"at most {_quantity(row['high'], 'B')}"
        rows.append(
            [
                escape(row["quantity"]),
                _quantity(row["predicted"], row["unit"]),
                interval,
                _quantity(row["measured"], row["unit"]),
                _percent(row["error"], sign=True),
                inside,
            ]
        )
    return table(["", "predicted", "90 % interval", "measured", "error", ""], rows, {1, 2, 3, 4})


def _devices(report: Report) -> str:
    rows = [
        [
            escape(one["device"]),
            str(one["batch_size"]),
            f"{one['samples']:,}",
            "–" if one["samples_per_s"] is None else f"{one['samples_per_s']:,.0f}",
            seconds(one["step_time_s"]),
            _percent(one["computing"]),
            _percent(one["waiting"]),
            _percent(one["communicating"]),
            size(one["peak_memory_bytes"]),
            seconds(one["cpu_s"]),
        ]
        for one in report.devices
    ]
    columns = [
        "device",
        "batch",
        "samples",
        "samples/s",
        "own step time",
        "computing",
        "waiting",
        "communicating",
        "peak memory",
        "CPU time",
    ]
    return table(columns, rows, set(range(1, 10)))


def _splits(result: Result) -> str:
    if not result.split_events:
        return "<p>The batch split did not change.</p>"
    rows = [
        [str(one.step), " : ".join(map(str, one.batch_sizes)), escape(one.reason)]
        for one in result.split_events
    ]
    return "<p>Changes of the batch split:</p>" + table(["from step", "split", "reason"], rows, {0})


def _learning_rate(search: LearningRateSearch | None, chart: str) -> str:
    if search is None:
        return ""
    return (
        f"<h2>Learning rate {search.learning_rate:.2g}</h2>"
        f"<p>{escape(search.source)}: {escape(search.reason)}</p>{chart}"
    )


def _data(validation: Validation | None) -> str:
    if validation is None:
        return ""
    met = sum(one.success for one in validation.expectations)
    return (
        f"<h2>Data</h2><p>{validation.checked_rows:,} rows; "
        f"{met} of {len(validation.expectations)} expectations met "
        f"(suite {escape(validation.suite_words)}).</p>"
        f"{drift_section(validation.drift)}{warning_section(validation.warnings)}"
    )


def _incomplete(report: Report) -> str:
    """The number of earlier runs without success, by state."""
    counts = Counter(row["state"] for row in report.history[1:] if row["state"] != "success")
    listed = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
    return f"<p>Not successful: {escape(listed)}.</p>" if counts else ""


def _runs(report: Report) -> str:
    rows = [
        [
            escape(row["id"]),
            escape(row["job"]),
            escape(row["state"]),
            "–" if row["accuracy"] is None else f"{row['accuracy']:.4f}",
            seconds(row["duration_s"]),
            _percent(row["duration_error"], sign=True),
            amount(row["energy_j"], "J").replace("-", "–"),
            str(row["devices"]),
        ]
        for row in report.history[:50]
    ]
    columns = [
        "run",
        "job",
        "state",
        "accuracy",
        "duration",
        "prediction off by",
        "energy",
        "devices",
    ]
    return table(columns, rows, {3, 4, 5, 6, 7})


def _figure(title: str, **options: Any) -> Any:
    from bokeh.plotting import figure

    tools = "pan,wheel_zoom,reset,hover"
    return _framed(figure(title=title, height=300, tools=tools, **options))


def _with_legend(shown: Any, place: str) -> Any:
    """The plot with its legend inside, where the curves leave room."""
    shown.legend.location = place
    shown.legend.background_fill_alpha = 0.7
    shown.legend.border_line_alpha = 0.3
    return shown


def _framed(shown: Any) -> Any:
    """The plot in the page's width; its tools appear while the pointer is over it."""
    shown.width, shown.sizing_mode = 980, "scale_width"
    shown.toolbar.logo = None
    shown.toolbar.autohide = True
    shown.min_border_left, shown.min_border_right = _BORDERS  # all plots have the same frame
    shown.grid.grid_line_alpha = 0.4
    return shown


def _epochs(epochs: list[dict[str, float | None]]) -> Any:
    from bokeh.models import BasicTicker, LinearAxis, Range1d

    shown = _figure("Loss and accuracy by epoch", x_axis_label="epoch", y_axis_label="loss")
    x = [None if (epoch := row["epoch"]) is None else epoch + 1 for row in epochs]
    shown.xaxis.ticker = BasicTicker(min_interval=1)
    for name, colour in (("train_loss", _COLOURS[5]), ("loss", _COLOURS[0])):
        shown.line(
            x,
            [row.get(name) for row in epochs],
            color=colour,
            width=2,
            legend_label=name.replace("_", " "),
        )
    accuracy = [row.get("accuracy") for row in epochs]
    known = [value for value in accuracy if value is not None]
    if known:
        shown.extra_y_ranges = {"accuracy": Range1d(start=min(known) - 0.02, end=1.005)}
        shown.add_layout(LinearAxis(y_range_name="accuracy", axis_label="accuracy"), "right")
        shown.line(
            x,
            accuracy,
            color=_COLOURS[2],
            width=2,
            y_range_name="accuracy",
            legend_label="accuracy",
        )
    return _with_legend(shown, "center_right")  # losses end below it, the accuracy above it


def _ratios(rows: list[dict[str, Any]]) -> Any:
    """Each prediction, with its interval, as a multiple of the measured value; 1 is exact."""
    from bokeh.models import Span

    known = [row for row in rows[::-1] if row["measured"]]
    names = [row["quantity"] for row in known]
    shown = _figure(
        "Predicted, as a multiple of measured", y_range=names, x_axis_label="predicted / measured"
    )
    shown.height = 90 + 26 * len(names)
    # Memory has only an upper bound.
    lows = [(row["low"] or row["predicted"]) / row["measured"] for row in known]
    shown.segment(
        lows,
        names,
        [row["high"] / row["measured"] for row in known],
        names,
        color=_COLOURS[5],
        line_width=3,
    )
    shown.scatter(
        [row["predicted"] / row["measured"] for row in known], names, color=_COLOURS[0], size=8
    )
    shown.add_layout(Span(location=1, dimension="height", line_color=_COLOURS[2], line_width=1))
    return shown


def _step_times(steps: pd.DataFrame) -> Any:
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
        colour = _COLOURS[place % len(_COLOURS)]
        shown.scatter(
            thin["step"].tolist(), times, size=3, color=colour, alpha=0.6, legend_label=str(device)
        )
    shown.y_range.start, shown.y_range.end = 0, highest * 1.3
    return _with_legend(shown, "top_right")


def _history(rows: list[dict[str, Any]]) -> Any:
    shown = _figure(
        "Accuracy of this job's runs", x_axis_label="run, oldest first", y_axis_label="accuracy"
    )
    x = list(range(1, len(rows) + 1))
    shown.line(x, [row["accuracy"] for row in rows], color=_COLOURS[0], width=1)
    shown.scatter(x, [row["accuracy"] for row in rows], color=_COLOURS[0], size=7)
    return shown
