"""Renders the report of a run: one self-contained HTML page with tables and bokeh charts."""

from __future__ import annotations

from collections import Counter
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any

from trainwright.tasks.analyze.embedded_charts import library, places, script
from trainwright.tasks.analyze.exports_section import exports_section
from trainwright.tasks.analyze.report_charts import (
    framed,
    losses,
    ratios,
    results,
    step_times,
    validation_metrics,
)
from trainwright.tasks.analyze.report_tables import (
    by_class,
    early_stop,
    recommended,
    trained_table,
    verdict_lines,
)
from trainwright.tasks.analyze.step import compared
from trainwright.tasks.html_page import html_page, table, tiles
from trainwright.tasks.runs.artefacts.learning_rate_search import LearningRateSearch
from trainwright.tasks.runs.artefacts.recommendation import Recommendation
from trainwright.tasks.runs.artefacts.report_figures import Report
from trainwright.tasks.runs.artefacts.training_result import Result
from trainwright.tasks.runs.artefacts.validation import Validation
from trainwright.tasks.runs.run import Run
from trainwright.tasks.search_lr.plot import chart as ramp_chart
from trainwright.tasks.spec.metric_names import shown_metrics
from trainwright.tasks.units import (
    amount,
    is_rough,
    is_unknown,
    metric,
    plain,
    predicted,
    seconds,
    size,
)
from trainwright.tasks.validate.rejection_page import drift_section, warning_section
from trainwright.tasks.verdicts import verdicts

if TYPE_CHECKING:
    import pandas as pd


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
    charts: dict[str, Any] = {}
    if any(row["measured"] for row in report.predicted_and_measured):
        charts["predicted"] = ratios(report.predicted_and_measured)
    if report.epochs:
        charts["losses"] = losses(report.epochs)
        if (shown := validation_metrics(report.epochs)) is not None:
            charts["validation"] = shown
    if len(steps):
        charts["steps"] = step_times(steps)
    if search is not None and search.points:
        charts["ramp"] = framed(ramp_chart(search, "loss"))
    leading = report.history[0]["metric"]
    history = [
        row
        for row in report.history
        if row["result"] is not None and (row["job"], row["metric"]) == (run.job_name, leading)
    ]
    if len(history) > 1:
        charts["history"] = results(history[::-1], leading)
    chart = places(charts)
    sections = [
        f"<h1>{escape(run.job_name)}</h1><p>{escape(run.uri)}</p>",
        verdict_lines(verdicts(run.job().train.target, result, recommendation)),
        _tiles(result),
        "<h2>Predicted and measured</h2>" + _predicted(report, result) + chart.get("predicted", ""),
        trained_table(run, result, search, recommendation),
        "<h2>Learning</h2>" + _stored(result) + early_stop(result.early_stopped),
        chart.get("losses", ""),
        chart.get("validation", ""),
        by_class(result.by_class) if result.by_class is not None else "",
        "<h2>Devices</h2>" + _devices(report) + chart.get("steps", "") + _splits(result),
        layout,
        recommended(recommendation),
        _learning_rate(search, chart.get("ramp", "")),
        _data(validation),
        exports_section(run),
        f"<h2>{compared(report.runs_compared).capitalize()}</h2>",
        _incomplete(report) + chart.get("history", "") + _runs(report),
    ]
    return html_page(f"{run.job_name} {run.id}", "".join(sections) + script(charts), library())


def is_report(content: bytes) -> bool:
    """Whether a file's content is a report."""
    return b"</title><style>\n:root {" in content[:10_000]


def _percent(value: float | None, sign: bool = False) -> str:
    if value is None:
        return "–"
    return f"{round(100 * value):{'+' if sign else ''}d} %".replace("-", "−")


def _tiles(result: Result) -> str:
    found = [(metric(value), name) for name, value in shown_metrics(result.metrics).items()]
    found += [
        (seconds(result.measured.duration_s), "training"),
        (
            amount(result.measured.energy_j, "J"),
            "energy, by datasheet" if result.measured.energy_source == "datasheet" else "energy",
        ),
        (f"{result.learning_rate:.2g}", "learning rate"),
        (f"{result.global_batch_size:,}", "global batch"),
        (f"{result.steps:,}", "steps"),
    ]
    return tiles(found)


def _stored(result: Result) -> str:
    stored = result.model_in_words
    return f"<p>The stored model is that of {stored}.</p>" if stored else ""


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


def _predicted(report: Report, result: Result) -> str:
    rows = []
    source = ", by datasheet" if result.measured.energy_source == "datasheet" else ""
    for row in report.predicted_and_measured:
        inside = (
            "–"
            if row["inside"] is None
            else '<span class="good">inside</span>'
            if row["inside"]
            else '<span class="bad">outside</span>'
        )
        low, high, unit = row["low"], row["high"], row["unit"]
        rough = is_rough(low, high)
        if is_unknown(low, high):
            interval = "not known"
        elif unit == "B":
            interval = f"at most {_quantity(high, unit)}"
        else:
            interval = f"{_quantity(low, unit)} to {_quantity(high, unit)}"
        rows.append(
            [
                escape(row["quantity"]) + (source if row["quantity"] == "energy" else ""),
                predicted(
                    {"median": row["predicted"], "low": low, "high": high},
                    seconds if unit == "s" else partial(_quantity, unit=unit),
                ),
                interval,
                _quantity(row["measured"], unit),
                _percent(None if rough else row["error"], sign=True),
                inside,
            ]
        )
    return table(["", "predicted", "90 % interval", "measured", "error", ""], rows, {1, 2, 3, 4})


def _devices(report: Report) -> str:
    rows = [
        [
            escape(one["device"]),
            f"{one['batch_size']:,}",
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
            "–"
            if row["result"] is None
            else escape(f"{row['metric'].replace('_', ' ')} {metric(row['result'])}"),
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
        "result",
        "duration",
        "prediction error",
        "energy",
        "devices",
    ]
    return table(columns, rows, {3, 4, 5, 6, 7})
