"""Draws the Pareto front as SVG: duration against energy, and against cost if prices are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from trainwright.estimator.named_file import write_named
from trainwright.tasks.allocate.plan.device_counts import as_text
from trainwright.tasks.cli.output import check_output
from trainwright.tasks.errors import BadInput
from trainwright.tasks.runs.artefacts import FrontPoint, Plan
from trainwright.tasks.units import amount, seconds

_MARK = "time against energy and cost, by trainwright plan"
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 420, 300, 70, 34, 44
_INK, _SOFT, _CHOSEN, _KEPT, _MISSED = "#1d2733", "#c9d1d9", "#d1495b", "#1f77b4", "#8d99ae"


def check_plot(path: Path) -> None:
    """Check where a plot is to be written.

    Raises BadInput for another suffix, a missing folder, or an existing file of another kind.
    """
    if path.suffix not in (".svg", ".html"):
        raise BadInput(f"--plot: got {path}; allowed: a file that ends in .svg or .html")
    check_output(path, "--plot", "plot of a plan", lambda content: _MARK.encode() in content)


def write_front(plan: Plan, path: Path) -> None:
    """Draw a plan's front into an .svg or .html file.

    Raises BadInput as `check_plot` does, or if the file can't be written.
    """
    check_plot(path)
    drawing = front_svg(plan.front)
    if path.suffix == ".html":
        drawing = (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            "<title>Time against energy and cost</title></head>"
            f"<body>{drawing}</body></html>\n"
        )
    write_named(path, drawing.encode(), "--plot")


def front_svg(points: Sequence[FrontPoint]) -> str:
    """A panel for energy and one for cost, as SVG.

    The plan is marked, points that miss a limit are grey, and tooltips name the devices.
    """
    panels: list[tuple[str, Callable[[FrontPoint], float | None], Callable[[float], str]]] = []
    if any(one.energy is not None for one in points):
        panels.append(("energy", lambda one: one.energy, lambda value: amount(value, "J")))
    if any(one.cost is not None for one in points):
        panels.append(("cost", lambda one: one.cost, lambda value: f"{value:.3g}"))
    parts = [
        _panel(
            number * (_LEFT + _WIDTH + 20),
            name,
            [(one, value) for one in points if (value := pick(one)) is not None],
            show,
        )
        for number, (name, pick, show) in enumerate(panels)
    ]
    width, height = max(1, len(panels)) * (_LEFT + _WIDTH + 20), _TOP + _HEIGHT + _BOTTOM
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="11" fill="{_INK}">'
        f'<desc>{_MARK}</desc><rect width="{width}" height="{height}" fill="white"/>'
        f"{''.join(parts)}</svg>\n"
    )


def _panel(
    left: int, name: str, points: Sequence[tuple[FrontPoint, float]], show: Callable[[float], str]
) -> str:
    x_low, x_high = _range([one.time for one, _ in points])
    y_low, y_high = _range([value for _, value in points])

    def x(value: float) -> float:
        return left + _LEFT + _WIDTH * (value - x_low) / (x_high - x_low)

    def y(value: float) -> float:
        return _TOP + _HEIGHT * (1 - (value - y_low) / (y_high - y_low))

    start, end, below = left + _LEFT, left + _LEFT + _WIDTH, _TOP + _HEIGHT + 18
    parts = [f'<text x="{start}" y="20" font-size="13">duration and {name}</text>']
    for step in range(5):
        at_x, at_y = x_low + (x_high - x_low) * step / 4, y_low + (y_high - y_low) * step / 4
        height = y(at_y)
        parts += [
            f'<line x1="{start}" x2="{end}" y1="{height:.1f}" y2="{height:.1f}" stroke="{_SOFT}"/>',
            f'<text x="{start - 6}" y="{height + 4:.1f}" text-anchor="end">'
            f"{escape(show(at_y))}</text>",
            f'<text x="{x(at_x):.1f}" y="{below}" text-anchor="middle">'
            f"{escape(seconds(at_x))}</text>",
        ]
    for one, value in points:
        colour = _CHOSEN if one.chosen else _KEPT if one.feasible else _MISSED
        missed = "" if one.feasible else " (misses a limit)"
        words = f"{as_text(one.devices)}: {seconds(one.time)}, {show(value)}{missed}"
        radius = 6 if one.chosen else 4
        parts.append(
            f'<circle cx="{x(one.time):.1f}" cy="{y(value):.1f}" r="{radius}" fill="{colour}">'
            f"<title>{escape(words)}</title></circle>"
        )
    return "".join(parts)


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    pad = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return low - pad, high + pad
