"""Shapes of a plot as SVG, and the boxes that they take."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import NamedTuple

from trainwright.tasks.plots.colours import CARD, TEXT

CHARACTER = 6.6
"""Width of a character of text, on average: 0.6 of its height."""
Point = tuple[float, float]


class Drawing(NamedTuple):
    """The content of an SVG picture, and its size in pixels."""

    content: str
    width: int
    height: int


def svg(drawing: Drawing) -> str:
    """A drawing as an SVG document."""
    content, width, height = drawing
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" '
        f'font-family="DejaVu Sans, Verdana, sans-serif" font-size="11" fill="{TEXT}">'
        f'<rect width="{width}" height="{height}" fill="{CARD}"/>{content}</svg>\n'
    )


class Box(NamedTuple):
    """A rectangle, in pixels from the top left corner."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: Box) -> bool:
        """Whether they overlap."""
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )


def line_box(start: Point, end: Point) -> Box:
    """The box of a horizontal or vertical line."""
    (left, right), (top, bottom) = sorted((start[0], end[0])), sorted((start[1], end[1]))
    return Box(left - 1, top - 1, right + 1, bottom + 1)


def boxes_around(x: float, y: float, words: str) -> Iterator[Box]:
    """Boxes for a text beside a point: right, left, above, below, then further away."""
    width, height = CHARACTER * len(words), 13.0
    for gap in (8.0, 16.0, 28.0):
        for left, middle in (
            (x + gap, y),
            (x - gap - width, y),
            (x + gap / 2, y - gap - height / 2),
            (x + gap / 2, y + gap + height / 2),
            (x - width - gap / 2, y - gap - height / 2),
            (x - width - gap / 2, y + gap + height / 2),
            (x - width / 2, y - gap - height / 2),
            (x - width / 2, y + gap + height / 2),
        ):
            yield Box(left, middle - height / 2, left + width, middle + height / 2)


def line(start: Point, end: Point, colour: str, *, dashed: bool = False) -> str:
    """A line as SVG."""
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return (
        f'<line x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}" '
        f'stroke="{colour}"{dash}/>'
    )


def text(
    x: float,
    y: float,
    words: str,
    anchor: str = "start",
    size: int = 11,
    *,
    bold: bool = False,
    colour: str = "",
) -> str:
    """A text as SVG, legible on lines."""
    more = ' font-weight="bold"' if bold else ""
    more += f' fill="{colour}"' if colour else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
        f'paint-order="stroke" stroke="{CARD}" stroke-width="3" stroke-linejoin="round"{more}>'
        f"{escape(words)}</text>"
    )
