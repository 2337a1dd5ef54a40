"""Predicted against measured times as an SVG, with one panel per method."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

SIDE = 300
_LEFT, _TOP, _GAP, _BOTTOM, _LEGEND_LINE = 56, 30, 44, 56, 15
_TICKS = (1, 2, 5)
_COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#000000",
)  # Okabe and Ito, 2008
_SHAPES = ("circle", "square", "triangle")


@dataclass(frozen=True)
class Point:
    """A case in seconds: the measured time with its spread, the predicted one with its interval."""

    family: str
    measured: float
    predicted: float
    spread: tuple[float, float] | None = None
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class Panel:
    """A method and its cases."""

    title: str
    points: Sequence[Point]


def draw(panels: Sequence[Panel], unit: str = "ms", per_second: float = 1e3) -> str:
    """The SVG. All panels share the axes, which cover all measurements and predictions."""
    values = [
        value * per_second
        for panel in panels
        for one in panel.points
        for value in (one.measured, one.predicted)
        if value > 0
    ]
    low, high = _end_at_a_tick(min(values), up=False), _end_at_a_tick(max(values), up=True)
    families = sorted({one.family for panel in panels for one in panel.points})
    columns = max(1, len(panels) * 2)
    lines = math.ceil(len(families) / columns)
    width = _LEFT + len(panels) * (SIDE + _GAP)
    height = _TOP + SIDE + _BOTTOM + (lines + 1) * _LEGEND_LINE + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for number, panel in enumerate(panels):
        parts += _panel(
            panel,
            _LEFT + number * (SIDE + _GAP),
            (low, high),
            families,
            unit,
            per_second,
            first=not number,
        )
    for number, family in enumerate(families):
        x = _LEFT + (number % columns) * (width - _LEFT) / columns
        y = _TOP + SIDE + _BOTTOM + (number // columns) * _LEGEND_LINE
        parts += [
            _mark(x, y, families.index(family)),
            f'<text x="{x + 9:.1f}" y="{y + 4:.1f}">{html.escape(family)}</text>',
        ]
    parts.append(
        f'<text x="{_LEFT}" y="{height - 10}" fill="#444">dashed: predicted = measured; grey band: '
        "within 25 %; bars: 90 % interval of the prediction, 10th to 90th percentile of the "
        "measurement's rounds</text>"
    )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _end_at_a_tick(value: float, *, up: bool) -> float:
    """The logarithm of the next tick below or above."""
    exponents = [math.log10(tick) for tick in _TICKS]
    power = math.floor(math.log10(value))
    every = [power + shift + one for shift in (0, 1) for one in exponents]
    at = math.log10(value)
    return min(one for one in every if one >= at) if up else max(one for one in every if one <= at)


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
        f'<line x1="{left}" y1="{_TOP + SIDE}" x2="{left + SIDE}" y2="{_TOP}" stroke="#777" '
        'stroke-dasharray="4 3"/>',
        f'<rect x="{left}" y="{_TOP}" width="{SIDE}" height="{SIDE}" fill="none" stroke="black"/>',
        f'<text x="{left + SIDE / 2}" y="{_TOP - 10}" text-anchor="middle" font-size="12">'
        f"{html.escape(panel.title)}</text>",
        f'<text x="{left + SIDE / 2}" y="{_TOP + SIDE + 32}" text-anchor="middle">'
        f"measured step time, {unit}</text>",
    ]
    for power in range(math.floor(low), math.ceil(high) + 1):
        for tick in range(1, 10):
            value = tick * 10.0**power
            if not low - 1e-9 <= math.log10(value) <= high + 1e-9:
                continue
            x, y, named = across(value), up(value), tick in _TICKS
            length = 5 if named else 3
            parts += [
                f'<line x1="{x:.1f}" y1="{_TOP + SIDE}" x2="{x:.1f}" '
                f'y2="{_TOP + SIDE + length}" stroke="black"/>',
                f'<line x1="{left - length}" y1="{y:.1f}" x2="{left}" y2="{y:.1f}" '
                'stroke="black"/>',
            ]
            if named:
                parts += [
                    f'<text x="{x:.1f}" y="{_TOP + SIDE + 17}" text-anchor="middle">'
                    f"{value:g}</text>",
                    f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>',
                ]
    if first:
        middle = _TOP + SIDE / 2
        parts.append(
            f'<text x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">'
            f"predicted step time, {unit}</text>"
        )
    for one in panel.points:
        x, y = across(one.measured * per_second), up(max(one.predicted * per_second, 1e-9))
        if one.interval is not None:
            bottom, top = (up(max(end * per_second, 1e-9)) for end in one.interval)
            parts.append(_bar(x, bottom, x, top))
        if one.spread is not None:
            start_x, end_x = (across(end * per_second) for end in one.spread)
            parts.append(_bar(start_x, y, end_x, y))
    for one in panel.points:
        x, y = across(one.measured * per_second), up(max(one.predicted * per_second, 1e-9))
        parts.append(_mark(x, y, families.index(one.family)))
    return parts


def _bar(x1: float, y1: float, x2: float, y2: float) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="#999" stroke-width="0.8"/>'


def _mark(x: float, y: float, number: int) -> str:
    colour, shape = (
        _COLOURS[number % len(_COLOURS)],
        _SHAPES[number // len(_COLOURS) % len(_SHAPES)],
    )
    style = f'fill="{colour}" fill-opacity="0.75" stroke="{colour}" stroke-width="0.6"'
    if shape == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" {style}/>'
    if shape == "square":
        return f'<rect x="{x - 2.8:.1f}" y="{y - 2.8:.1f}" width="5.6" height="5.6" {style}/>'
    corners = f"{x:.1f},{y - 3.8:.1f} {x - 3.5:.1f},{y + 2.6:.1f} {x + 3.5:.1f},{y + 2.6:.1f}"
    return f'<polygon points="{corners}" {style}/>'
