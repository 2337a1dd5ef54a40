"""Tables and a figure of `step_time.py`: all methods on the same measurements, by group and clock.

The pieces of a session, each with its own calibration, are combined by number of threads. The bar
for intervals applies to all cases together; the table shows each session, because on a busy machine
more times are outside.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import figure
from accuracy import (
    HEADER,
    Accuracy,
    noise_floor,
    percent,
    quantile,
    row,
    summarise,
    table,
)
from timing import CLOCKS

OURS, FEW, DATASHEET = "trainwright, calibrated", "trainwright, few-shot", "trainwright, datasheet"
MODES = (OURS, FEW, DATASHEET)
HELD_OUT, IN_FAMILY = "held out", "in family"
BARS = {HELD_OUT: ((0.10, 1.5), (0.25, 1.25)), IN_FAMILY: ((0.06, 1.2), (0.15, 1.1))}
TWO_THREADS = ((0.12, 1.5), (0.28, 1.25))
BETTER_BY = 1.5
INSIDE = (0.85, 0.95)


@dataclass
class Row:
    """A case: predicted seconds and intervals by method, and measured seconds of each round by
    clock, in this process and in another one.
    """

    label: str
    family: str
    group: str
    batch_size: int
    predicted_s: dict[str, float]
    intervals_s: dict[str, tuple[float, float]]
    rounds_s: dict[str, list[float]] = field(default_factory=dict)
    elsewhere_s: dict[str, list[float]] = field(default_factory=dict)

    def seconds(self, clock: str) -> float:
        """The median over the rounds."""
        return statistics.median(self.rounds_s[clock])

    def between_processes(self, clock: str) -> float | None:
        """The difference between the medians of two processes; None if there was only one."""
        elsewhere = self.elsewhere_s.get(clock)
        return abs(statistics.median(elsewhere) / self.seconds(clock) - 1) if elsewhere else None


@dataclass
class Piece:
    """The results of one run of the benchmark."""

    processor: str
    torch: str
    threads: int
    seed: int
    calibrated_in_s: float
    machine: str
    rows: list[Row]

    def document(self) -> dict[str, Any]:
        """The piece as JSON."""
        return asdict(self)

    @staticmethod
    def read(document: dict[str, Any]) -> Piece:
        """The piece in a JSON document."""
        return Piece(**{**document, "rows": [Row(**one) for one in document["rows"]]})


def compare(rows: Sequence[Row], clock: str) -> dict[str, Accuracy]:
    """The accuracy of each method that predicted all of them, by a clock."""
    measured = [one.seconds(clock) for one in rows]
    noise = [noise_floor(one.rounds_s[clock]) for one in rows]
    return {
        name: summarise(
            [one.predicted_s[name] for one in rows],
            measured,
            noise=noise,
            intervals=[one.intervals_s[name] for one in rows]
            if name in rows[0].intervals_s
            else [],
        )
        for name in rows[0].predicted_s
        if all(name in one.predicted_s for one in rows)
    }


def report(pieces: Sequence[Piece]) -> None:
    """Print the pieces' origins, and the tables of each thread count."""
    for one in pieces:
        print(
            f"piece of seed {one.seed}: {len(one.rows)} cases, {one.threads} thread(s), "
            f"{one.processor}, torch {one.torch}, calibrated in {one.calibrated_in_s:.0f} s; "
            f"the machine meanwhile: {one.machine}"
        )
    for threads in sorted({one.threads for one in pieces}):
        rows = [row for one in pieces if one.threads == threads for row in one.rows]
        ends = [
            quantile([one.seconds(CLOCKS[0]) for one in rows], share) * 1e3 for share in (0, 0.5, 1)
        ]
        print(f"\nsteps of {ends[0]:.1f} to {ends[2]:.0f} ms, median {ends[1]:.0f}")
        for group in BARS:
            members = [one for one in rows if one.group == group]
            if members:
                for clock in (
                    CLOCKS if threads == 1 else CLOCKS[:2]
                ):  # CPU seconds of several threads are not a step time
                    _tables(group, members, clock, threads)
                _families(members, CLOCKS[1])
    _intervals(pieces)


def _intervals(pieces: Sequence[Piece]) -> None:
    """Print the share of cases inside their intervals, and the width: by session, and of all."""
    print(f"\n{OURS}: in interval")
    lines = [("session", "threads", "group", "cases", *CLOCKS[:2], "high / low")]
    for one in pieces:
        for group in BARS:
            if members := [each for each in one.rows if each.group == group]:
                lines.append((f"seed {one.seed}", str(one.threads), group, *_inside(members)))
    rows = [row for one in pieces for row in one.rows]
    print(table([*lines, ("all", "", "", *_inside(rows))]))
    (low, high), few = (
        INSIDE,
        "" if len(rows) >= 200 else f" (of {len(rows)}; the bar is of 200 cases or more)",
    )
    for clock in CLOCKS[:2]:
        share = compare(rows, clock)[OURS].coverage
        assert share is not None
        verdict = "met" if low <= share <= high else "missed"
        print(
            f"bar: in interval, {clock}, {percent(low)} <= {percent(share)} <= {percent(high)}: "
            f"{verdict}{few}"
        )


def _inside(rows: Sequence[Row]) -> tuple[str, str, str, str]:
    """The number of cases, the shares inside by the first two clocks, and the median width."""
    wall, normalised = (compare(rows, clock)[OURS] for clock in CLOCKS[:2])
    return str(len(rows)), percent(wall.coverage), percent(normalised.coverage), f"{wall.width:.2f}"


def _tables(group: str, rows: Sequence[Row], clock: str, threads: int) -> None:
    """Print the methods, the noise, and whether the first method meets the bars."""
    found = compare(rows, clock)
    ours = found[OURS]
    floors = [_floor("noise floor", [noise_floor(one.rounds_s[clock]) for one in rows])]
    between = [one for one in (each.between_processes(clock) for each in rows) if one is not None]
    if between:
        floors.append(_floor("difference between two processes", between))
    ordered = sorted(found.items(), key=lambda one: one[1].median)
    print(f"\n{group}, {clock}, {threads} thread{'s' if threads > 1 else ''}")
    print(table([HEADER, *(row(name, each) for name, each in ordered), *floors]))
    (median, by_median), (p90, by_p90) = (
        TWO_THREADS if threads > 1 and group == HELD_OUT else BARS[group]
    )
    assert ours.noise_median is not None
    assert ours.noise_p90 is not None
    for name, value, bar in (
        ("median", ours.median, max(median, by_median * ours.noise_median)),
        ("p90", ours.p90, max(p90, by_p90 * ours.noise_p90)),
    ):
        print(
            f"bar: {name} {percent(value)} <= {percent(bar)}: {'met' if value <= bar else 'missed'}"
        )
    others = {name: each for name, each in found.items() if name not in MODES}
    if not others:
        return
    name, best = min(others.items(), key=lambda one: one[1].median)
    ratio = best.median / ours.median
    print(
        f"bar: the best baseline's median ({name}) is {ratio:.2f}x ours, >= {BETTER_BY:g}x: "
        f"{'met' if ratio >= BETTER_BY else 'missed'}"
    )


def _floor(name: str, noise: Sequence[float]) -> tuple[str, ...]:
    """A noise floor's row below `HEADER`."""
    return (
        name,
        str(len(noise)),
        percent(quantile(noise, 0.5)),
        percent(quantile(noise, 0.9)),
        "",
        percent(max(noise)),
        "",
        "",
    )


def _families(rows: Sequence[Row], clock: str) -> None:
    """Our accuracy on each family, the worst last."""
    families: dict[str, list[Row]] = defaultdict(list)
    for one in rows:
        families[one.family].append(one)
    found = {name: compare(members, clock)[OURS] for name, members in families.items()}
    ordered = sorted(found.items(), key=lambda one: one[1].median)
    print(f"\n{OURS}, by family, {clock}")
    lines = [(*row(name, each), percent(each.noise_median)) for name, each in ordered]
    print(table([("family", *HEADER[1:], "noise"), *lines]))


def panels(pieces: Sequence[Piece], group: str = HELD_OUT) -> list[figure.Panel]:
    """The panels of the lowest thread count: ours, then the two best other methods."""
    threads, clock = min(one.threads for one in pieces), CLOCKS[1]
    rows = [
        row for one in pieces if one.threads == threads for row in one.rows if row.group == group
    ]
    found = compare(rows, clock)
    others = sorted(
        (name for name in found if name not in MODES), key=lambda name: found[name].median
    )
    return [
        figure.Panel(
            f"{name}: median error {percent(found[name].median)}",
            [
                figure.Point(
                    one.family,
                    one.seconds(clock),
                    one.predicted_s[name],
                    (quantile(one.rounds_s[clock], 0.1), quantile(one.rounds_s[clock], 0.9)),
                    one.intervals_s.get(name),
                )
                for one in rows
            ],
        )
        for name in (OURS, *others[:2])
    ]
