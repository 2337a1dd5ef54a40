"""Draws the timeline of a planned step as SVG: ranks down, milliseconds to the right.

Each rank has a lane for what it computes and, below it, a lower one for what is on the wire. A
stage of a pipeline that was trained has a third one, for the passes of a measured step.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from html import escape

from trainwright.tasks.allocate.timeline.lanes import (
    BACKWARD,
    MOST_RANKS,
    WAIT,
    WORDS,
    Bar,
    compute_lane,
    measured_lane,
    shown_ranks,
    transfer_lane,
)
from trainwright.tasks.allocate.timeline.measured_step import MeasuredStep
from trainwright.tasks.allocate.timeline.simulated_plan import SimulatedPlan
from trainwright.tasks.plots.colours import CARD, LINE, MUTED, TEXT
from trainwright.tasks.plots.plot_axis import Axis
from trainwright.tasks.plots.plot_shapes import CHARACTER, Drawing, line, svg, text
from trainwright.tasks.units import plain, seconds, size

WIDTH = 1080
_LEFT, _RIGHT = 176, 150
_COMPUTE, _TRANSFER, _GAP, _MEASURED = 20, 13, 13, 20
"""Heights of the lanes, the space below a rank, and that for the lane of a measured step."""
_LEAST = 2.5
"""Pixels: shorter actions are joined with their neighbours."""
_COLOURS = {
    "forward": "#6baed6",
    "input-gradient": "#fdae6b",
    "weight-gradient": "#e6550d",
    BACKWARD: "#f16913",
    "recompute": "#c6dbef",
    "update": "#756bb1",
    WAIT: LINE,
    "sum": "#31a354",
    "gather": "#41b6c4",
    "exchange": "#c994c7",
    "scatter-sum": "#dd1c77",
    "average": "#b7950b",
    "agree": "#737373",
    "send": "#2171b5",
}
_OTHER = "#969696"
_DARK = (BACKWARD, "weight-gradient", "update", "sum", "scatter-sum", "average", "agree")
"""Bars whose labels are white."""


def timeline(simulated: SimulatedPlan, measured: MeasuredStep | None = None) -> Drawing:
    """The timeline of a planned step, and beside it that of a measured step if there is one."""
    import numpy as np

    step, known = simulated.step, measured or MeasuredStep()
    ranks = shown_ranks(step)
    last_s = max((float(np.nanmax(ends)) for _, _, ends in step.events), default=0.0)
    shown_s = max(step.step_s, last_s, known.step_s)
    axis = Axis(0.0, max(1e3 * shown_s, 1e-6), _LEFT, WIDTH - _RIGHT, log=False)
    least_s = shown_s * _LEAST / (WIDTH - _RIGHT - _LEFT)
    lanes = [
        (
            compute_lane(step, rank, least_s),
            transfer_lane(step, simulated.sizes, rank, least_s),
            measured_lane(found, least_s)
            if (found := known.of_device(simulated.plan.devices[rank].id))
            else [],
        )
        for rank in ranks
    ]
    head, top = _head(simulated, known, ranks)
    top += 34
    each = _COMPUTE + _TRANSFER + _GAP + (_MEASURED if known.step_s else 0)
    bottom = top + len(ranks) * each
    rows = [
        part
        for place, (rank, own) in enumerate(zip(ranks, lanes, strict=True))
        for part in _rank(simulated, known, rank, own, axis, top + place * each)
    ]
    kinds = {bar.kind for own in lanes for lane in own for bar in lane}
    legend, height = _legend(kinds, bottom + 52, measured=known.step_s > 0)
    parts = [*head, *_axis(axis, top, bottom), *rows, *legend]
    return Drawing("".join(parts), WIDTH, height)


def timeline_svg(simulated: SimulatedPlan, measured: MeasuredStep | None = None) -> str:
    """The timeline as a picture of its own."""
    return svg(timeline(simulated, measured))


def _head(
    simulated: SimulatedPlan, measured: MeasuredStep, ranks: Sequence[int]
) -> tuple[list[str], int]:
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
    if simulated.layout.has_stages and simulated.step.step_s:
        step = simulated.step
        idle = 1 - sum(step.computed_s) / (len(step.sent_bytes) * step.step_s)
        words.append(f"Devices wait for {plain(100 * idle, 2)} % of it.")
    if measured.step_s:
        words.append(
            f"Measured: the passes of a step end after {seconds(measured.step_s)}; devices wait "
            f"for {plain(100 * measured.bubble, 2)} % of that."
        )
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
        parts.append(text(12, y, row, colour=MUTED))
    return parts, y


def _axis(axis: Axis, top: int, bottom: int) -> Iterator[str]:
    for value, label in axis.ticks():
        x = axis.at(value)
        yield line((x, top - 8), (x, bottom), LINE)
        yield text(x, bottom + 14, label, "middle", colour=MUTED)
        yield text(x, top - 12, label, "middle", colour=MUTED)
    yield text((_LEFT + WIDTH - _RIGHT) / 2, bottom + 32, "time since the step began, ms", "middle")


def _rank(
    simulated: SimulatedPlan,
    measured: MeasuredStep,
    rank: int,
    lanes: tuple[list[Bar], list[Bar], list[Bar]],
    axis: Axis,
    top: int,
) -> Iterator[str]:
    """A rank's name, lanes and sums."""
    compute, transfers, passes = lanes
    device, spent = simulated.plan.devices[rank], simulated.step.seconds(rank)
    name = _cut(f"{rank}: {device.id}", _LEFT - 20)
    yield f"<g><title>{escape(_about(simulated, rank))}</title>"
    yield text(12, top + 13, name)
    yield text(12, top + 28, f"batch {device.batch_size}", colour=MUTED) + "</g>"
    yield from _lane(compute, axis, top, _COMPUTE, labels=True)
    yield from _lane(transfers, axis, top + _COMPUTE + 1, _TRANSFER, labels=False)
    below = top + _COMPUTE + _TRANSFER + 2
    yield from _lane(passes, axis, below, _MEASURED - 4, labels=False)
    step_s = simulated.step.step_s or 1.0
    x, sent = WIDTH - _RIGHT + 12, simulated.step.sent_bytes[rank]
    yield text(x, top + 13, f"computes {plain(100 * spent['compute'] / step_s, 2)} %")
    yield text(x, top + 28, f"sends {size(sent)}", colour=MUTED)
    if simulated.layout.has_stages:
        yield from _memory(simulated, measured, rank, x, top + 34)


def _memory(
    simulated: SimulatedPlan, measured: MeasuredStep, rank: int, x: int, top: int
) -> Iterator[str]:
    """A bar of a device's memory: the planned peak of its stage, and a line at the measured one."""
    limit = simulated.memory_bytes[rank] if simulated.memory_bytes else None
    if not limit:
        return
    device = simulated.plan.devices[rank]
    width, need = _RIGHT - 28, device.peak_memory_bytes
    peak = measured.peak_bytes.get(device.id)
    title = f"memory: {size(need)} planned of {size(limit)}"
    title += f", {size(peak)} measured" if peak is not None else ""
    yield f"<g><title>{escape(title)}</title>"
    for part, colour in ((1.0, LINE), (min(1.0, need / limit), _COLOURS["forward"])):
        yield f'<rect x="{x}" y="{top}" width="{width * part:.1f}" height="6" fill="{colour}"/>'
    if peak is not None:
        at = x + width * min(1.0, peak / limit)
        yield line((at, top - 1), (at, top + 7), TEXT)
    yield "</g>"


def _about(simulated: SimulatedPlan, rank: int) -> str:
    device = simulated.plan.devices[rank]
    return f"rank {rank}: {device.id}, {device.type}, {device.batch_size} samples of a step"


def _lane(bars: Sequence[Bar], axis: Axis, top: int, height: int, *, labels: bool) -> Iterator[str]:
    for bar in bars:
        begin, end = axis.at(1e3 * bar.begin_s), axis.at(1e3 * bar.end_s)
        width = max(0.6, end - begin)
        shape = (
            f'<rect x="{begin:.2f}" y="{top}" width="{width:.2f}" height="{height}" '
            f'fill="{_COLOURS.get(bar.kind, _OTHER)}" stroke="{CARD}" '
            f'stroke-width="{0.5 if width > 3 else 0}">'
            f"<title>{escape(bar.title)}</title></rect>"
        )
        label = bar.label if labels and bar.kind != WAIT else ""
        if label and CHARACTER * 0.85 * len(label) + 6 < width:
            colour = "white" if bar.kind in _DARK else "black"  # in any theme
            shape += (
                f'<text x="{(begin + end) / 2:.1f}" y="{top + 14}" text-anchor="middle" '
                f'font-size="10" fill="{colour}" pointer-events="none">{escape(label)}</text>'
            )
        yield shape


def _legend(kinds: set[str], top: int, *, measured: bool) -> tuple[list[str], int]:
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
            f'fill="{_COLOURS.get(kind, _OTHER)}" stroke="{LINE}"/>'
        )
        parts.append(text(x + 20, y, words))
        x += width + 14
    y += 22
    about = (
        "Upper lane of a rank: what it computes, or waits for. Lower lane: what is on the wire. "
        "A name or number in a bar is a layer's."
    )
    parts.append(text(12, y, about, colour=MUTED))
    y += 16
    about = "Bars too short to draw are joined; rest the pointer on one to see its layers."
    parts.append(text(12, y, about, colour=MUTED))
    if measured:
        y += 16
        about = "Lowest lane: the passes of a measured step, each rank's by its own clock."
        parts.append(text(12, y, about, colour=MUTED))
    return parts, y + 16


def _cut(words: str, width: float) -> str:
    """The words, cut to a width in pixels."""
    most = int(width / CHARACTER)
    return words if len(words) <= most else f"{words[: most - 1]}…"
