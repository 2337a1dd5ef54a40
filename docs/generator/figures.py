"""Pictures of the explanations, drawn while the site is built from what the code computes."""

from __future__ import annotations

from functools import partial
from typing import get_args
from xml.sax.saxutils import escape

from trainwright.tasks.allocate.actions.schedules import StagePass, passes_of
from trainwright.tasks.allocate.plan.split import split_batch
from trainwright.tasks.runs.artefacts.layout import StageSchedule

_STAGES, _PARTS = 4, 8
_TIMES = {"forward": 1, "backward": 2, "input-gradient": 1, "weight-gradient": 1}
_COLOURS = {
    "forward": "#5b8def",
    "backward": "#43a047",
    "input-gradient": "#43a047",
    "weight-gradient": "#f0a43a",
}
_WORDS = {
    "forward": "forward",
    "backward": "backward, or gradient of inputs",
    "weight-gradient": "gradient of weights",
}
_Spans = list[tuple[StagePass, int]]
"""Passes of a stage with their begin."""


def schedules() -> str:
    """Stages of a pipeline over time, under each schedule."""
    played = {name: _played(name) for name in get_args(StageSchedule)}
    unit, row, left, top = 15, 20, 60, 46
    parts, height = list[str](), top
    for name, stages in played.items():
        end = max(begin + _TIMES[one.kind] for spans in stages for one, begin in spans)
        parts.append(_text(left, height - 6, f"{name}: {end} units of time", bold=True))
        for stage, spans in enumerate(stages):
            y = height + stage * row
            parts.append(_text(8, y + 14, f"stage {stage}"))
            parts.append(_box(left, y, unit * end, row - 3, "#e4e4e4"))
            for one, begin in spans:
                x, width = left + begin * unit, _TIMES[one.kind] * unit
                parts.append(_box(x, y, width - 1, row - 3, _COLOURS[one.kind]))
                parts.append(_text(x + width / 2 - 3, y + 13, str(one.micro_batch), "#fff", 9))
        height += _STAGES * row + 28
    x = left
    for kind, words in _WORDS.items():
        parts += [_box(x, 8, 12, 12, _COLOURS[kind]), _text(x + 17, 18, words)]
        x += 40 + 7 * len(words)
    parts += [_box(x, 8, 12, 12, "#e4e4e4"), _text(x + 17, 18, "waits")]
    return _svg(740, height - 14, parts)


def _played(schedule: StageSchedule) -> list[_Spans]:
    """When each stage does its passes, if messages take no time."""
    waiting = [passes_of(schedule, _STAGES, one, _PARTS) for one in range(_STAGES)]
    ends: dict[tuple[str, int, int], int] = {}
    found: list[_Spans] = [[] for _ in waiting]
    free = [0] * _STAGES
    while any(waiting):
        for stage, passes in enumerate(waiting):
            if not passes:
                continue
            one = passes[0]
            kind = "forward" if one.kind == "forward" else "gradient"
            before = _before(one, stage)
            if before is not None and before not in ends:
                continue
            begin = max(free[stage], ends[before] if before else 0)
            found[stage].append((passes.pop(0), begin))
            free[stage] = begin + _TIMES[one.kind]
            if one.kind != "weight-gradient":
                ends[kind, stage, one.micro_batch] = free[stage]
    return found


def _before(one: StagePass, stage: int) -> tuple[str, int, int] | None:
    """The other stage's pass for which a pass waits."""
    if one.kind == "forward":
        return ("forward", stage - 1, one.micro_batch) if stage else None
    if one.kind == "weight-gradient" or stage == _STAGES - 1:
        return None
    return "gradient", stage + 1, one.micro_batch


def water_filling() -> str:
    """Times of three devices over their batch, and the level at which they finish together."""
    devices = {"fast": (2.0, 0.10), "middle": (3.0, 0.2), "slow": (2.0, 0.4)}
    curves = [partial(_time, a, s) for a, s in devices.values()]
    shares = split_batch(120, curves)
    assert shares is not None
    level = max(curve(share) for curve, share in zip(curves, shares, strict=True))
    left, bottom, wide, tall = 60, 270, 6.2, 16
    y = bottom - level * tall
    parts = [
        f'<path d="M{left} 20V{bottom}H{left + 560}" fill="none" stroke="#555"/>',
        _text(left + 430, bottom + 28, "samples of a device"),
        _text(8, 16, "time of a step, ms"),
        f'<path d="M{left} {y}H{left + 560}" stroke="#c62828" stroke-dasharray="6 4"/>',
        _text(left + 300, y - 7, f"level W = {level:.1f} ms", "#c62828"),
    ]
    for place in range(0, 81, 20):
        parts.append(_text(left + place * wide - 6, bottom + 14, str(place)))
    for (name, (a, s)), share, colour in zip(
        devices.items(), shares, ("#5b8def", "#43a047", "#f0a43a"), strict=True
    ):
        most = min(88.0, (15 - a) / s)
        x, end = left + share * wide, left + most * wide
        parts += [
            f'<path d="M{left} {bottom - a * tall}L{end} {bottom - (a + s * most) * tall}" '
            f'stroke="{colour}" stroke-width="2"/>',
            f'<path d="M{x} {y}V{bottom}" stroke="{colour}" stroke-dasharray="3 3"/>',
            f'<circle cx="{x}" cy="{bottom - (a + s * share) * tall}" r="4" fill="{colour}"/>',
            _text(x + 6, bottom - 8, f"{name}: {share}", colour, bold=True),
        ]
    return _svg(640, bottom + 40, parts)


def _time(start: float, slope: float, samples: int) -> float:
    return start + slope * samples


def _box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="2" fill="{colour}"/>'


def _text(
    x: float, y: float, text: str, colour: str = "#333", size: int = 12, bold: bool = False
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    style = f'font-size="{size}" fill="{colour}"{weight}'
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(text)}</text>'


def _svg(width: int, height: float, parts: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:g}" '
    return (
        f'{head}width="{width}" font-family="sans-serif">'
        f'<rect width="100%" height="100%" rx="6" fill="#fafafa"/>{"".join(parts)}</svg>\n'
    )
