"""One panel of a plan's plot: points, the front's stepped line, limits, labels that do not overlap.

Coordinates are pixels from the panel's top left corner; text is 11 pixels high.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal, NamedTuple

from trainwright.tasks.cli.screens.quantities import TIMES, unit_of
from trainwright.tasks.plots.colours import BLUE, CARD, LINE
from trainwright.tasks.plots.plot_axis import Axis
from trainwright.tasks.plots.plot_shapes import (
    CHARACTER,
    Box,
    Point,
    boxes_around,
    line,
    line_box,
    text,
)
from trainwright.tasks.runs.artefacts.plan import NotExceeded
from trainwright.tasks.units import amount, plain, seconds

WIDTH, HEIGHT = 540, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 86, 18, 34, 52
_FAR = 3.0
"""A limit that is further than this factor above all points is beyond the axis."""
LIMIT, STEP = "#b7791f", "#8fb3d9"
Quantity = Literal["energy", "cost"]
Style = Literal["plan", "front", "missed", "rival", "missed rival"]
COLOURS: dict[Style, str] = {
    "plan": "#d1495b",
    "front": BLUE,
    "missed": "#8d99ae",
    "rival": BLUE,
    "missed rival": "#8d99ae",
}


@dataclass(frozen=True)
class Mark:
    """A numbered point: its medians in s, J and the pool's currency."""

    number: int
    style: Style
    devices: str
    time: float
    energy: float | None
    cost: float | None

    def value(self, name: Quantity) -> float | None:
        """Its energy or cost."""
        return self.energy if name == "energy" else self.cost

    def words(self, currency: str | None) -> str:
        """The devices and all figures."""
        figures = [seconds(self.time)]
        if self.energy is not None:
            figures.append(amount(self.energy, "J"))
        if self.cost is not None:
            figures.append(f"{plain(self.cost)} {currency or 'units'}")
        return f"{self.devices}: {', '.join(figures)}"


class Limit(NamedTuple):
    """An upper limit, of the time or of the panel's quantity."""

    name: str
    value: float
    of_time: bool


def symbol(style: Style, x: float, y: float, title: str = "") -> str:
    """A point's symbol: filled if it is on the front, larger if it is the plan."""
    colour, on_front = COLOURS[style], style in ("plan", "front", "missed")
    fill = colour if on_front else CARD
    inside = f"<title>{escape(title)}</title>" if title else ""
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{6 if style == "plan" else 4}" fill="{fill}" '
        f'stroke="{colour}" stroke-width="1.5">{inside}</circle>'
    )


class Panel:
    """The points of a plan in one quantity against time; `unit` is the quantity's."""

    def __init__(
        self,
        name: Quantity,
        unit: tuple[float, str],
        marks: Sequence[Mark],
        limits: Sequence[Limit],
        most: NotExceeded | None,
        currency: str | None,
    ) -> None:
        self._currency = currency
        self._name, (self._scale, self._unit) = name, unit
        self._title = f"duration and {name}"
        self._marks = [one for one in marks if one.value(name) is not None]
        self._seconds, self._time_unit = unit_of([one.time for one in marks], TIMES)
        self._limits = limits
        self._most_s = most.duration_s if most and any(one.of_time for one in limits) else None
        money = most is not None and any(not one.of_time for one in limits)
        self._most_cost = most.cost if most and money else None
        times = [one.time for one in marks] + [self._most_s or 0.0]
        values = [self._value(one) for one in self._marks] + [self._most_cost or 0.0]
        within = [
            one for one in limits if one.value <= _FAR * max(times if one.of_time else values)
        ]
        self._within = within
        self._x = Axis.over(
            [one / self._seconds for one in times if one > 0]
            + [one.value / self._seconds for one in within if one.of_time],
            _LEFT,
            WIDTH - _RIGHT,
        )
        self._y = Axis.over(
            [one / self._scale for one in values[:-1]]
            + [one.value / self._scale for one in within if not one.of_time]
            + ([self._most_cost / self._scale] if self._most_cost else []),
            HEIGHT - _BOTTOM,
            _TOP,
        )
        self._taken: list[Box] = []
        """Points and texts."""
        self._lines: list[Box] = []

    def svg(self, left: int) -> str:
        """The panel as SVG, `left` pixels from the left."""
        parts = [
            *self._axes(),
            *self._limit_lines(),
            *self._stepped(),
            *self._bars(),
            *(
                symbol(one.style, *self._place(one), one.words(self._currency))
                for one in self._marks
            ),
            *self._labels(),
        ]
        return f'<g transform="translate({left} 0)">{"".join(parts)}</g>'

    def _value(self, one: Mark) -> float:
        value = one.value(self._name)
        assert value is not None
        return value

    def _place(self, one: Mark) -> tuple[float, float]:
        return self._x.at(one.time / self._seconds), self._y.at(self._value(one) / self._scale)

    def _axes(self) -> Iterator[str]:
        right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
        for value, label in self._x.ticks():
            x = self._x.at(value)
            yield line((x, _TOP), (x, bottom), LINE)
            yield text(x, bottom + 16, label, "middle")
        for value, label in self._y.ticks():
            y = self._y.at(value)
            yield line((_LEFT, y), (right, y), LINE)
            yield text(_LEFT - 6, y + 4, label, "end")
        yield text(_LEFT, 20, self._title, size=13)
        middle = (_TOP + bottom) / 2
        scales = [" (logarithmic)" if axis.log else "" for axis in (self._x, self._y)]
        yield text(
            (_LEFT + right) / 2,
            bottom + 38,
            f"duration, {self._time_unit}{scales[0]}",
            "middle",
            12,
        )
        yield (
            f'<g transform="translate(16 {middle:.1f}) rotate(-90)">'
            f"{text(0, 0, f'{self._name}, {self._unit}{scales[1]}', 'middle', 12)}</g>"
        )

    def _limit_lines(self) -> Iterator[str]:
        """A dashed line at each limit; those beyond an axis are named above it."""
        right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
        top, beyond = _TOP + 12.0, []
        for one in self._limits:
            scale, unit = (
                (self._seconds, self._time_unit) if one.of_time else (self._scale, self._unit)
            )
            words = f"{one.name} {plain(one.value / scale)} {unit}"
            if one not in self._within:
                beyond.append(words)
            elif one.of_time:
                x = self._x.at(one.value / scale)
                yield self._drawn((x, _TOP), (x, bottom), LIMIT, dashed=True)
                near = x > (_LEFT + right) / 2
                yield self._note(x - 5 if near else x + 5, top, words, "end" if near else "start")
                top += 15
            else:
                y = self._y.at(one.value / scale)
                yield self._drawn((_LEFT, y), (right, y), LIMIT, dashed=True)
                yield self._note(_LEFT + 5, y + 13, words, "start")
        if beyond:
            words = f"beyond the axes: {', '.join(beyond)}"
            beside = CHARACTER * len(words) < right - _LEFT - 2 * CHARACTER * len(self._title)
            yield self._note(right, 20 if beside else _TOP - 3, words, "end")

    def _note(self, x: float, y: float, words: str, anchor: str) -> str:
        width = CHARACTER * len(words)
        left = x - width if anchor == "end" else x
        self._taken.append(Box(left, y - 10, left + width, y + 3))
        return text(x, y, words, anchor, colour=LIMIT)

    def _stepped(self) -> Iterator[str]:
        """The least value that some choice needs in each time."""
        corners: list[tuple[float, float]] = []
        for x, y in sorted(map(self._place, self._marks), key=lambda one: (one[0], -one[1])):
            if not corners:
                corners.append((x, _TOP))
            if y > corners[-1][1] or len(corners) == 1:
                corners += [(x, corners[-1][1]), (x, y)]
        corners.append((WIDTH - _RIGHT, corners[-1][1]))
        self._lines += [line_box(*pair) for pair in itertools.pairwise(corners)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
        yield f'<polyline points="{path}" fill="none" stroke="{STEP}" stroke-width="1.5"/>'

    def _bars(self) -> Iterator[str]:
        """From the plan's medians to the values that the limits apply to."""
        for one in self._marks:
            if one.style == "plan":
                x, y = self._place(one)
                if self._most_s:
                    end = self._x.at(self._most_s / self._seconds)
                    yield self._drawn((x, y), (end, y), COLOURS["plan"])
                    yield self._drawn((end, y - 4), (end, y + 4), COLOURS["plan"])
                if self._most_cost:
                    end = self._y.at(self._most_cost / self._scale)
                    yield self._drawn((x, y), (x, end), COLOURS["plan"])
                    yield self._drawn((x - 4, end), (x + 4, end), COLOURS["plan"])

    def _drawn(self, start: Point, end: Point, colour: str, *, dashed: bool = False) -> str:
        """A line that labels avoid."""
        self._lines.append(line_box(start, end))
        return line(start, end, colour, dashed=dashed)

    def _labels(self) -> Iterator[str]:
        """Number and devices beside each point; the number alone where they would overlap.

        The plan's label is placed first. Only a number may lie on a line.
        """
        for one in self._marks:
            x, y = self._place(one)
            self._taken.append(Box(x - 5, y - 5, x + 5, y + 5))
        for one in sorted(self._marks, key=lambda one: (one.style != "plan", one.number)):
            bold = one.style == "plan"
            short = f"{one.number}"
            tries = [
                (f"{short}: {one.devices}", [*self._taken, *self._lines]),
                (short, [*self._taken, *self._lines]),
                (short, self._taken),
            ]
            found = next(
                (
                    (words, place)
                    for words, others in tries
                    for place in boxes_around(*self._place(one), words)
                    if _inside(place) and not any(place.meets(other) for other in others)
                ),
                None,
            )
            if found is not None:
                words, box = found
                self._taken.append(box)
                yield text(box.left, box.bottom - 3, words, bold=bold, colour=COLOURS[one.style])


def _inside(box: Box) -> bool:
    return (
        box.left >= _LEFT
        and box.right <= WIDTH - _RIGHT
        and box.top >= _TOP
        and box.bottom <= HEIGHT - _BOTTOM
    )
