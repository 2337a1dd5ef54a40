"""The report's section on the plan's layout: by layer, other layouts, one step over time."""

from __future__ import annotations

from html import escape

from trainwright.tasks.allocate.layouts.words import SYNC_WORDS, layers_text
from trainwright.tasks.allocate.timeline.measured_step import MeasuredStep
from trainwright.tasks.allocate.timeline.simulated_plan import simulated_plan
from trainwright.tasks.allocate.timeline.timeline_svg import timeline_svg
from trainwright.tasks.errors import BadInput
from trainwright.tasks.html_page import table
from trainwright.tasks.runs.artefacts.estimate import Estimate
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.runs.artefacts.training_result import Result
from trainwright.tasks.units import seconds, size

_OPEN_ROWS = 8
"""A longer table of layers is folded."""


def layout_section(plan: Plan, estimate: Estimate | None, result: Result | None = None) -> str:
    """The section, in HTML; empty for a plan without a layout."""
    if plan.layout is None:
        return ""
    why = f" ({escape(plan.layout_rule)})" if plan.layout_rule else ""
    words = escape(plan.layout_in_words or plan.layout.name)
    return (
        f"<h2>Layout</h2><p>{words}{why}</p>"
        f"{_by_layer(plan)}{_others(plan)}{_timeline(plan, estimate, result)}"
    )


def _by_layer(plan: Plan) -> str:
    if not plan.by_layer:
        return ""
    rows = [
        [
            escape(layers_text(one)),
            SYNC_WORDS[one.sync].replace(" ", "&nbsp;").replace("-", "&#8209;"),
            size(one.sent_bytes),
            escape(one.why),
        ]
        for one in plan.by_layer
    ]
    shown = table(["layers", "how", "a device sends in a step", "why"], rows, {2})
    if len(rows) <= _OPEN_ROWS:
        return shown
    return f"<details><summary>by layer, {len(rows)} groups</summary>{shown}</details>"


def _others(plan: Plan) -> str:
    rows = [
        [
            escape(one.layout_in_words),
            seconds(one.predicted.step_time_s.median) if one.predicted else "–",
            escape(one.reason),
        ]
        for one in plan.alternatives
        if one.layout_in_words
    ]
    if not rows:
        return ""
    head = "<p>Other layouts:</p>"
    return head + table(["layout", "step time", "why not chosen"], rows, {1})


def _timeline(plan: Plan, estimate: Estimate | None, result: Result | None) -> str:
    if estimate is None:
        return ""
    try:
        drawn = timeline_svg(simulated_plan(plan, estimate), MeasuredStep.of(result))
    except BadInput as error:
        return f"<p>{escape(str(error))}</p>"
    about = "one step as predicted, rank by rank"
    if MeasuredStep.of(result).stages:
        about += ", and the passes of a measured step"
    return (
        f"<details open><summary>{about}</summary>"
        f'<div class="wide" tabindex="0">{drawn}</div></details>'
    )
