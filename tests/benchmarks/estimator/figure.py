"""Predicted against measured on logarithmic axes, as an SVG: a panel for each method, a mark for each model."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

SIDE = 300
_LEFT, _TOP, _GAP, _BOTTOM, _LEGEND_LINE = 56, 30, 44, 48, 15
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")  # Okabe and Ito, 2008
_SHAPES = ("circle", "square", "triangle")


@dataclass(frozen=True)
class Panel:
    """A method: (family, measured s, predicted s, interval or None) of each case."""

    title: str
    points: Sequence[tuple[str, float, float, tuple[float, float] | None]]


def draw(panels: Sequence[Panel], unit: str = "ms", per_second: float = 1e3) -> str:
    """The SVG. All panels share the axes; a line marks predicted = measured, a band ± 25 %, bars the intervals."""
    values = [
        value * per_second for panel in panels for _, one, two, _ in panel.points for value in (one, two) if value > 0
    ]
    low, high = math.floor(math.log10(min(values)) * 2) / 2, math.ceil(math.log10(max(values)) * 2) / 2
    families = sorted({family for panel in panels for family, *_ in panel.points})
    columns = max(1, len(panels) * 2)
    lines = math.ceil(len(families) / columns)
    width = _LEFT + len(panels) * (SIDE + _GAP)
    height = _TOP + SIDE + _BOTTOM + lines * _LEGEND_LINE + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for number, panel in enumerate(panels):
        parts += _panel(
            panel, _LEFT + number * (SIDE + _GAP), (low, high), families, unit, per_second, first=not number
        )
    for number, family in enumerate(families):
        x = _LEFT + (number % columns) * (width - _LEFT) / columns
        y = _TOP + SIDE + _BOTTOM + (number // columns) * _LEGEND_LINE
        parts += [
            _mark(x, y, families.index(family)),
            f'<text x="{x + 9:.1f}" y="{y + 4:.1f}">{html.escape(family)}</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(
    panel: Panel,
    left: float,
    ends: tuple[float, float],
    families: list[str],
    unit: str,
    per_second: float,
    *,
    first: bool,
) -> list[str]:
    low, high = ends

    def across(value: float) -> float:
        return left + SIDE * (min(max(math.log10(value), low), high) - low) / (high - low)

    def up(value: float) -> float:
        return _TOP + SIDE - SIDE * (min(max(math.log10(value), low), high) - low) / (high - low)

    start, end = 10**low, 10**high
    band = [
        (start, start * 1.25),
        (end / 1.25, end),
        (end, end),
        (end, end / 1.25),
        (start * 1.25, start),
        (start, start),
    ]
    corners = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in band)
    parts = [
        f'<polygon points="{corners}" fill="#e8e8e8"/>',
        f'<line x1="{left}" y1="{_TOP + SIDE}" x2="{left + SIDE}" y2="{_TOP}" stroke="#777" stroke-dasharray="4 3"/>',
        f'<rect x="{left}" y="{_TOP}" width="{SIDE}" height="{SIDE}" fill="none" stroke="black"/>',
        f'<text x="{left + SIDE / 2}" y="{_TOP - 10}" text-anchor="middle" font-size="12">{html.escape(panel.title)}</text>',
        f'<text x="{left + SIDE / 2}" y="{_TOP + SIDE + 32}" text-anchor="middle">measured step time, {unit}</text>',
    ]
    for power in range(math.ceil(low), math.floor(high) + 1):
        x, y, label = across(10.0**power), up(10.0**power), f"{10.0**power:g}"
        parts += [
            f'<line x1="{x:.1f}" y1="{_TOP + SIDE}" x2="{x:.1f}" y2="{_TOP + SIDE + 5}" stroke="black"/>',
            f'<text x="{x:.1f}" y="{_TOP + SIDE + 17}" text-anchor="middle">{label}</text>',
            f'<line x1="{left - 5}" y1="{y:.1f}" x2="{left}" y2="{y:.1f}" stroke="black"/>',
            f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>',
        ]
    if first:
        middle = _TOP + SIDE / 2
        parts.append(
            f'<text x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">predicted, {unit}</text>'
        )
    for family, measured, predicted, interval in panel.points:
        x, y = across(measured * per_second), up(max(predicted * per_second, 1e-9))
        if interval is not None:
            bottom, top = (up(max(one * per_second, 1e-9)) for one in interval)
            parts.append(
                f'<line x1="{x:.1f}" y1="{bottom:.1f}" x2="{x:.1f}" y2="{top:.1f}" stroke="#999" stroke-width="0.8"/>'
            )
        parts.append(_mark(x, y, families.index(family)))
    return parts


def _mark(x: float, y: float, number: int) -> str:
    colour, shape = _COLOURS[number % len(_COLOURS)], _SHAPES[number // len(_COLOURS) % len(_SHAPES)]
    style = f'fill="{colour}" fill-opacity="0.75" stroke="{colour}" stroke-width="0.6"'
    if shape == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" {style}/>'
    if shape == "square":
        return f'<rect x="{x - 2.8:.1f}" y="{y - 2.8:.1f}" width="5.6" height="5.6" {style}/>'
    return f'<polygon points="{x:.1f},{y - 3.8:.1f} {x - 3.5:.1f},{y + 2.6:.1f} {x + 3.5:.1f},{y + 2.6:.1f}" {style}/>'
