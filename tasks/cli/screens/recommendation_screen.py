"""Shows recommended models to a person: a table, and under it the reasons."""

from __future__ import annotations

from trainwright.estimator.curves import Interval
from trainwright.tasks.cli.screens.console import out, table
from trainwright.tasks.runs.artefacts.recommendation import Candidate, Recommendation
from trainwright.tasks.units import amount, plain, seconds


def show_recommendation(found: Recommendation) -> None:
    """The boosted trees' verdict, then the candidates in order with what they need, and why."""
    listed = found.candidates
    probed = any(one.probed_metric is not None for one in listed)
    priced = any(one.cost is not None for one in listed)
    columns = (
        "",
        "template",
        "size",
        "parameters",
        f"{found.metric or 'metric'} (80 % interval)",
        *(["probed"] if probed else []),
        "time",
        "energy",
        *(["cost"] if priced else []),
    )
    rows = [
        (
            str(place),
            one.template,
            one.size,
            f"{one.parameters:,}",
            _metric(one.predicted_metric),
            *([_number(one.probed_metric)] if probed else []),
            _time(one),
            amount(one.energy_j.median, "J") if one.energy_j else "-",
            *([plain(one.cost.median) if one.cost else "-"] if priced else []),
        )
        for place, one in enumerate(listed, 1)
    ]
    for note in found.notes:
        out.print(note, markup=False)
    table(f"models for {found.task}", columns, rows, right=range(3, len(columns)))
    for place, one in enumerate(listed, 1):
        out.print(f"{place}. {one.name}: {one.why}", markup=False)
    out.print()


def _metric(one: Interval | None) -> str:
    if one is None:
        return "unknown"
    return f"{_number(one.median)}  ({_number(one.low)} to {_number(one.high)})"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if abs(value) < 1 else plain(value, 4)


def _time(one: Candidate) -> str:
    if one.duration_s is not None:
        return seconds(one.duration_s.median)
    return f"at least {seconds(one.least_deadline_s)}" if one.least_deadline_s else "no plan"
