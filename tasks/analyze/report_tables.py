"""HTML tables of the report: of recommended models, and of a classification by class."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from trainwright.estimator.curves import Interval
from trainwright.tasks.html_page import table
from trainwright.tasks.runs.artefacts.learning_rate_search import LearningRateSearch
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.runs.artefacts.recommendation import Recommendation
from trainwright.tasks.runs.artefacts.run_job import RunJob
from trainwright.tasks.runs.artefacts.training_result import ClassMetrics, EarlyStop, Result
from trainwright.tasks.runs.run import Run, job_of
from trainwright.tasks.trained_with import RunFacts, trained_with
from trainwright.tasks.units import plain, seconds
from trainwright.tasks.verdicts import Verdict


def verdict_lines(judged: Sequence[Verdict]) -> str:
    """What a run means, a line for each verdict; it stands before all figures."""
    kinds = {True: " good", False: " bad", None: ""}
    return "".join(
        f'<p class="verdict{kinds[verdict.good]}">{escape(verdict.words)}</p>' for verdict in judged
    )


def early_stop(found: EarlyStop | None) -> str:
    """The reason for an early stop; empty without one."""
    return f"<p>Training {escape(found.reason)}.</p>" if found is not None else ""


def trained_table(
    run: Run,
    result: Result,
    search: LearningRateSearch | None,
    recommendation: Recommendation | None,
) -> str:
    """With what the run trained, and what the job says if that differs."""
    stored = run.read(RunJob)
    job = job_of(stored, recommendation)
    facts = RunFacts(stored, job, recommendation, run.find(Plan), search, result)
    rows = [
        [escape(field.name), escape(field.used), escape(field.given or "")]
        for field in trained_with(facts)
    ]
    return "<h2>Trained with</h2>" + table(["", "used", "the job says"], rows, set())


def recommended(found: Recommendation | None) -> str:
    """The candidates for the run's model, and why the first was chosen; empty for a given model."""
    if found is None or found.chosen is None:
        return ""
    rows = [
        [
            str(place),
            escape(one.name),
            f"{one.parameters:,}",
            _predicted(one.predicted_metric),
            seconds(one.duration_s.median) if one.duration_s else "–",
            escape(one.why),
        ]
        for place, one in enumerate(found.candidates, 1)
    ]
    metric = escape(f"{found.metric or 'metric'} (80 % interval)")
    columns = ["", "candidate", "parameters", metric, "time", "why"]
    recipe = "; ".join(f"{name} {value}" for name, value in found.recipe.items())
    notes = "".join(f"<p>{escape(note)}</p>" for note in found.notes)
    return (
        f"<h2>Recommended model</h2>{notes}<p>{escape(found.reason)}</p>"
        f"{table(columns, rows, {2, 4})}<p>Recipe: {escape(recipe)}</p>"
    )


def _predicted(one: Interval | None) -> str:
    if one is None:
        return "unknown"
    return f"{plain(one.median, 4)} ({plain(one.low, 4)} to {plain(one.high, 4)})"


def by_class(found: ClassMetrics) -> str:
    """Precision, recall and F1 of each class, and which classes were confused."""
    rows = [
        [escape(name), *(f"{value:.4f}" for value in values), f"{count:,}"]
        for name, *values, count in zip(
            found.names, found.precision, found.recall, found.f1, found.rows, strict=True
        )
    ]
    columns = ["class", "precision", "recall", "F1", "validation rows"]
    confused = _confusion(found) if found.confusion else _pairs(found)
    return "<h2>Classes</h2>" + table(columns, rows, {1, 2, 3, 4}) + confused


def _pairs(found: ClassMetrics) -> str:
    """The most frequent confusions, if there are too many classes for a matrix."""
    rows = [[escape(one.actual), escape(one.predicted), f"{one.rows:,}"] for one in found.confused]
    head = f"<p>The {len(rows)} most frequent confusions:</p>"
    return head + table(["true class", "predicted", "rows"], rows, {2}) if rows else ""


def _confusion(found: ClassMetrics) -> str:
    """Rows are true classes, columns predicted ones; shades are shares of the row."""
    lines = []
    for place, (name, counts) in enumerate(zip(found.names, found.confusion, strict=True)):
        cells = ""
        for column, count in enumerate(counts):
            colour = "42,125,111" if column == place else "178,58,72"
            shade = 0.7 * count / max(1, found.rows[place])
            style = f' style="background:rgba({colour},{shade:.2f})"' if count else ""
            cells += f"<td{style}>{count:,}</td>"
        lines.append(f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>')
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in found.names)
    return (
        "<p>Confusion matrix: rows are the true classes, columns the predicted ones.</p>"
        f'<div class="wide" tabindex="0"><table class="confusion"><tr><th></th>{head}</tr>'
        f"{''.join(lines)}</table></div>"
    )
