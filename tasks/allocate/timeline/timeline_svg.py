"""Draws the timeline of a planned step as SVG: ranks down, milliseconds to the right.

Each rank has a lane for what it computes and, below it, a lower one for what is on the wire.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from html import escape

from trainwright.tasks.allocate.timeline.lanes import (
    MOST_RANKS,
    WAIT,
    WORDS,
    Bar,
    compute_lane,
    shown_ranks,
    transfer_lane,
)
from trainwright.tasks.allocate.timeline.simulated_plan import SimulatedPlan
from trainwright.tasks.plots.plot_axis import Axis
from trainwright.tasks.plots.plot_shapes import CHARACTER, GRID, INK, Drawing, line, svg, text
from trainwright.tasks.units import plain, seconds, size

WIDTH = 1080
_LEFT, _RIGHT = 176, 150
_COMPUTE, _TRANSFER, _GAP = 20, 13, 13
"""Heights of the lanes, and the space below a rank."""
_LEAST = 2.5
"""Pixels: shorter actions are joined with their neighbours."""
_SOFT = "#5b6875"
_COLOURS = {
    "forward": "#6baed6",
    "input-gradient": "#fdae6b",
    "weight-gradient": "#e6550d",
    "update": "#756bb1",
    WAIT: "#eceff2",
    "sum": "#31a354",
    "gather": "#41b6c4",
    "exchange": "#c994c7",
    "scatter-sum": "#dd1c77",
    "average": "#b7950b",
    "agree": "#636363",
}
_OTHER = "#969696"
_DARK = ("weight-gradient", "update", "sum", "scatter-sum", "average", "agree")
"""Bars whose labels are white."""


def timeline(simulated: SimulatedPlan) -> Drawing:
    """The timeline of a planned step."""
    step = simulated.step
    ranks = shown_ranks(step)
    step_ms = 1e3 * step.step_s
    axis = Axis(0.0, max(step_ms, 1e-6), _LEFT, WIDTH - _RIGHT, log=False)
    least_s = step.step_s * _LEAST / (WIDTH - _RIGHT - _LEFT)
    lanes = [
        (compute_lane(step, rank, least_s), transfer_lane(step, simulated.sizes, rank, least_s))
        for rank in ranks
    ]
    head, top = _head(simulated, ranks)
    top += 34
    bottom = top + len(ranks) * (_COMPUTE + _TRANSFER + _GAP)
    rows = [
        part
        for place, (rank, (compute, transfers)) in enumerate(zip(ranks, lanes, strict=True))
        for part in _rank(
            simulated, rank, compute, transfers, axis, top + place * (_COMPUTE + _TRANSFER + _GAP)
        )
    ]
    kinds = {bar.kind for pair in lanes for lane in pair for bar in lane}
    legend, height = _legend(kinds, bottom + 52)
    parts = [*head, *_axis(axis, top, bottom), *rows, *legend]
    return Drawing("".join(parts), WIDTH, height)


def timeline_svg(simulated: SimulatedPlan) -> str:
    """The timeline as a picture of its own."""
    return svg(timeline(simulated))


def _head(simulated: SimulatedPlan, ranks: Sequence[int]) -> tuple[list[str], int]:
    """The title and what is shown, as SVG, and the height below them."""
    plan, count = simulated.plan, len(simulated.plan.devices)
    often = simulated.layout.average_every if simulated.layout.averages else None
    words = [f"Simulated: {seconds(simulated.step.step_s)}."]
    if plan.predicted is not None:
        one = plan.predicted.step_time_s
        words = [
            f"Simulated: {seconds(simulated.step.step_s)}; the plan predicts {seconds(one.median)} "
            f"({seconds(one.low)} to {seconds(one.high)})"
            + (" as the mean of all steps." if often else ".")
        ]
    if often:
        words.append(f"This step ends with an average of parameters, as one in {often} does.")
    if plan.layout_in_words:
        words.insert(0, f"Layout: {plan.layout_in_words}.")
    if len(ranks) < count:
        words.append(
            f"{MOST_RANKS} of {count} ranks, evenly spread from the one that computes least to the "
            "one that computes most."
        )
    parts, y = [text(12, 22, "one step, rank by rank", size=13)], 22
    for row in textwrap.wrap(" ".join(words), int((WIDTH - 24) / CHARACTER)):
        y += 17
        parts.append(text(12, y, row, colour=_SOFT))
    return parts, y


def _axis(axis: Axis, top: int, bottom: int) -> Iterator[str]:
    for value, label in axis.ticks():
        x = axis.at(value)
        yield line((x, top - 8), (x, bottom), GRID)
        yield text(x, bottom + 14, label, "middle", colour=_SOFT)
        yield text(x, top - 12, label, "middle", colour=_SOFT)
    yield text((_LEFT + WIDTH - _RIGHT) / 2, bottom + 32, "time since the step began, ms", "middle")


def _rank(
    simulated: SimulatedPlan,
    rank: int,
    compute: Sequence[Bar],
    transfers: Sequence[Bar],
    axis: Axis,
    top: int,
) -> Iterator[str]:
    """A rank's name, lanes and sums."""
    device, spent = simulated.plan.devices[rank], simulated.step.seconds(rank)
    name = _cut(f"{rank}: {device.id}", _LEFT - 20)
    yield f"<g><title>{escape(_about(simulated, rank))}</title>"
    yield text(12, top + 13, name)
    yield text(12, top + 28, f"batch {device.batch_size}", colour=_SOFT) + "</g>"
    yield from _lane(compute, axis, top, _COMPUTE, labels=True)
    yield from _lane(transfers, axis, top + _COMPUTE + 1, _TRANSFER, labels=False)
    step_s = simulated.step.step_s or 1.0
    x, sent = WIDTH - _RIGHT + 12, simulated.step.sent_bytes[rank]
    yield text(x, top + 13, f"computes {plain(100 * spent['compute'] / step_s, 2)} %")
    yield text(x, top + 28, f"sends {size(sent)}", colour=_SOFT)


def _about(simulated: SimulatedPlan, rank: int) -> str:
    device = simulated.plan.devices[rank]
    return f"rank {rank}: {device.id}, {device.type}, {device.batch_size} samples of a step"


def _lane(bars: Sequence[Bar], axis: Axis, top: int, height: int, *, labels: bool) -> Iterator[str]:
    for bar in bars:
        begin, end = axis.at(1e3 * bar.begin_s), axis.at(1e3 * bar.end_s)
        width = max(0.6, end - begin)
        shape = (
            f'<rect x="{begin:.2f}" y="{top}" width="{width:.2f}" height="{height}" '
            f'fill="{_COLOURS.get(bar.kind, _OTHER)}" stroke="white" '
            f'stroke-width="{0.5 if width > 3 else 0}">'
            f"<title>{escape(bar.title)}</title></rect>"
        )
        label = bar.label if labels and bar.kind != WAIT else ""
        if label and CHARACTER * 0.85 * len(label) + 6 < width:
            colour = "white" if bar.kind in _DARK else INK
            shape += (
                f'<text x="{(begin + end) / 2:.1f}" y="{top + 14}" text-anchor="middle" '
                f'font-size="10" fill="{colour}" pointer-events="none">{escape(label)}</text>'
            )
        yield shape


def _legend(kinds: set[str], top: int) -> tuple[list[str], int]:
    """The kinds that are drawn, in rows, as SVG; and the height below them."""
    parts, x, y = [], 12.0, top
    names = [*(one for one in WORDS if one in kinds), *sorted(kinds - WORDS.keys())]
    for kind in names:
        words = WORDS.get(kind, kind)
        width = 30 + CHARACTER * len(words)
        if x + width > WIDTH - 12:
            x, y = 12.0, y + 20
        parts.append(
            f'<rect x="{x:.1f}" y="{y - 10}" width="14" height="12" '
            f'fill="{_COLOURS.get(kind, _OTHER)}" stroke="{GRID}"/>'
        )
        parts.append(text(x + 20, y, words))
        x += width + 14
    y += 22
    about = (
        "Upper lane of a rank: what it computes, or waits for. Lower lane: what is on the wire. "
        "Bars too short to see are joined; each says in its title what it is."
    )
    parts.append(text(12, y, about, colour=_SOFT))
    return parts, y + 16


def _cut(words: str, width: float) -> str:
    """The words, cut to a width in pixels."""
    most = int(width / CHARACTER)
    return words if len(words) <= most else f"{words[: most - 1]}…"
