"""Draws a plan as SVG: its rivals, by duration against energy and cost; one step, rank by rank.

The timeline of a step is left out if plan and estimate do not have what it takes.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from html import escape
from pathlib import Path

from trainwright.estimator.named_file import write_named
from trainwright.tasks.allocate.plan.device_counts import as_text
from trainwright.tasks.allocate.timeline.measured_step import MeasuredStep
from trainwright.tasks.allocate.timeline.simulated_plan import simulated_plan
from trainwright.tasks.allocate.timeline.timeline_svg import timeline
from trainwright.tasks.cli.output import check_output
from trainwright.tasks.cli.screens import console
from trainwright.tasks.cli.screens.plans.plan_screen import ALTERNATIVES_SHOWN
from trainwright.tasks.cli.screens.plans.plot_panel import (
    COLOURS,
    HEIGHT,
    LIMIT,
    STEP,
    WIDTH,
    Limit,
    Mark,
    Panel,
    Quantity,
    Style,
    symbol,
)
from trainwright.tasks.cli.screens.quantities import ENERGIES, money, unit_of
from trainwright.tasks.errors import BadInput
from trainwright.tasks.plots.plot_shapes import CHARACTER, Drawing, line, svg, text
from trainwright.tasks.runs.artefacts.estimate import Estimate
from trainwright.tasks.runs.artefacts.layout import DATA_PARALLEL
from trainwright.tasks.runs.artefacts.plan import Alternative, FrontPoint, Plan
from trainwright.tasks.runs.artefacts.training_result import Result
from trainwright.tasks.units import plain

_MARK = "time against energy and cost, by trainwright plan"
_TITLE = "time against energy and cost, and one step"
_LINE, _BETWEEN = 17, 18
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=[A-Za-z])|(?<=[a-z]) (?=\d+ (?:s|min)\b)")
"""A space that is no place to fold a line."""
_LEGEND: dict[Style, str] = {
    "plan": "the plan",
    "front": "on the front: none within the limits is better in time, energy and cost together",
    "missed": "on the front, but misses a limit",
    "rival": "alternative",
    "missed rival": "alternative that misses a limit",
}


def check_plot(path: Path) -> None:
    """Check where a plot is to be written.

    Raises BadInput for another suffix, a missing folder, or an existing file of another kind.
    """
    if path.suffix not in (".svg", ".html"):
        raise BadInput(f"--plot: got {path}; allowed: a file that ends in .svg or .html")
    check_output(path, "--plot", "plot of a plan", lambda content: _MARK.encode() in content)


def write_plan(
    plan: Plan, estimate: Estimate, path: Path, result: Result | None = None
) -> str | None:
    """Draw a plan's front and the timeline of a step into an .svg or .html file.

    `result`: that of the plan's training, with measured passes of a pipeline.
    Returns why there is no timeline, if there is none. Raises BadInput as `check_plot` does, or if
    the file can't be written.
    """
    check_plot(path)
    parts, missing = [front(plan)], None
    try:
        parts.append(timeline(simulated_plan(plan, estimate), MeasuredStep.of(result)))
    except BadInput as error:
        missing = str(error)
    drawing = _picture(parts)
    if path.suffix == ".html":
        drawing = (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            f"<title>Plan: {escape(_TITLE)}</title>"
            "<style>svg { max-width: 100%; height: auto }</style></head>"
            f"<body>{drawing}</body></html>\n"
        )
    write_named(path, drawing.encode(), "--plot")
    return missing


def draw_plan(plan: Plan, estimate: Estimate, path: Path, result: Result | None = None) -> None:
    """As `write_plan`; says on stderr where the drawing is, and why there is no timeline."""
    missing = write_plan(plan, estimate, path, result)
    line = f"saved to {path}" + (f"; {missing}" if missing else "")
    console.err.print(line, markup=False, soft_wrap=True)


def _picture(parts: Sequence[Drawing]) -> str:
    """Drawings below each other, as one SVG document."""
    width = max(one.width for one in parts)
    height, placed = 0, []
    for one in parts:
        placed.append(f'<g transform="translate(0 {height})">{one.content}</g>')
        height += one.height + _BETWEEN
    return svg(Drawing(f"<desc>{_MARK}</desc>{''.join(placed)}", width, height - _BETWEEN))


def front(plan: Plan) -> Drawing:
    """A panel for energy and one for cost, a legend, and the devices of each numbered point."""
    marks = _marks(plan)
    units: list[tuple[Quantity, tuple[float, str]]] = [
        ("energy", unit_of([one.energy for one in marks], ENERGIES)),
        ("cost", money(plan.currency)[0]),
    ]
    known = [one for one in units if any(mark.value(one[0]) is not None for mark in marks)]
    panels = [
        Panel(name, unit, marks, _limits(plan, name), plan.not_exceeded, plan.currency).svg(
            number * WIDTH
        )
        for number, (name, unit) in enumerate(known)
    ]
    width = max(1, len(panels)) * WIDTH
    key, bottom = _key(plan, marks, width)
    return Drawing(f"{''.join(panels)}{key}", width, bottom)


def _marks(plan: Plan) -> list[Mark]:
    """The front, then the first alternatives that are not on it, numbered from 1."""
    known = {_same(one) for one in plan.front}
    others = [one for one in plan.alternatives if one.predicted and _same(one) not in known]
    marks = [
        Mark(
            number,
            "plan" if one.chosen else "front" if one.feasible else "missed",
            _devices(one, plan),
            one.time,
            one.energy,
            one.cost,
        )
        for number, one in enumerate(plan.front, start=1)
    ]
    for one in others[:ALTERNATIVES_SHOWN]:
        assert one.predicted is not None
        energy, cost = one.predicted.energy_j, one.predicted.cost
        marks.append(
            Mark(
                len(marks) + 1,
                "rival" if one.feasible else "missed rival",
                _devices(one, plan),
                one.predicted.duration_s.median,
                energy.median if energy else None,
                cost.median if cost else None,
            )
        )
    return marks


def _same(one: FrontPoint | Alternative) -> object:
    return frozenset(one.devices.items()), one.global_batch_size, one.accumulation, one.layout


def _devices(one: FrontPoint | Alternative, plan: Plan) -> str:
    """Its devices, with what else differs from the plan."""
    text = as_text(one.devices)
    if one.global_batch_size != plan.global_batch_size:
        text += f", batch {one.global_batch_size}"
    if one.accumulation != plan.accumulation:
        text += f", {one.accumulation} micro-batch{'es' if one.accumulation > 1 else ''}"
    chosen = plan.layout.name if plan.layout is not None else DATA_PARALLEL
    names = {point.layout for point in plan.front} | {rival.layout for rival in plan.alternatives}
    if names <= {chosen}:
        return text
    return f"{text}, {one.layout}"


def _limits(plan: Plan, name: Quantity) -> list[Limit]:
    """The limits in a panel: of time in both, of money with the cost."""
    found = [
        Limit(text, value, of_time=True)
        for text, value in (("deadline", plan.deadline_s), ("hosts' windows", plan.window_s))
        if value is not None
    ]
    if name == "cost" and plan.budget is not None:
        found.append(Limit("budget", plan.budget, of_time=False))
    return found


def _key(plan: Plan, marks: Sequence[Mark], width: int) -> tuple[str, int]:
    """The numbered points and the legend, as SVG, and the height below them."""
    points = [
        (symbol(one.style, 20, -4), f"{one.number}: {one.words(plan.currency)}") for one in marks
    ]
    parts, below = _list(0, HEIGHT + 14, points)
    beside = width > WIDTH
    legend, end = _list(
        WIDTH if beside else 0, HEIGHT + 14 if beside else below + 8, _legend(plan, marks)
    )
    return parts + legend, max(below, end)


def _legend(plan: Plan, marks: Sequence[Mark]) -> list[tuple[str, str]]:
    """What the plot contains: a symbol and words for each."""
    found = [
        (symbol(style, 20, -4), words)
        for style, words in _LEGEND.items()
        if any(one.style == style for one in marks)
    ]
    found.append((line((12, -4), (28, -4), STEP), "the lowest value reachable within this time"))
    if plan.deadline_s or plan.window_s or plan.budget:
        found.append((line((12, -4), (28, -4), LIMIT, dashed=True), "a limit"))
        if plan.not_exceeded is not None:
            sure = f"{plain(100 * plan.not_exceeded.confidence, 4)} %"
            bar = line((12, -4), (28, -4), COLOURS["plan"])
            end = line((28, -8), (28, 0), COLOURS["plan"])
            found.append((bar + end, f"at most ({sure}): limits apply to this"))
    return found


def _list(left: int, top: int, entries: Sequence[tuple[str, str]]) -> tuple[str, int]:
    """Symbols with words beside them, one below the other, as SVG; and the height below them."""
    parts, y = [], top
    for drawing, words in entries:
        parts.append(f'<g transform="translate({left} {y})">{drawing}</g>')
        whole = _BEFORE_UNIT.sub("\N{NO-BREAK SPACE}", words)
        for row in textwrap.wrap(whole, int((WIDTH - 44) / CHARACTER)):
            parts.append(text(left + 34, y, row.replace("\N{NO-BREAK SPACE}", " ")))
            y += _LINE
    return "".join(parts), y
