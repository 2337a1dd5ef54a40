"""Small pictures of drift: shares of a column now and in the reference, as inline SVG."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from trainwright.tasks.plots.colours import BLUE, MUTED
from trainwright.tasks.runs.artefacts.data_profile import (
    Categories,
    ColumnProfile,
    Histogram,
    Numbers,
)

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

BARS = 24
MOST_CATEGORIES = 8
_TAIL = 0.01
"""Share of the rows at either end of the numbers that the first and the last bar contain."""
_WIDTH, _HEIGHT, _LINE = 360, 90, 16
_NOW, _REFERENCE = BLUE, "#b4bdc7"


def histogram(now: ColumnProfile, reference: ColumnProfile) -> Histogram | None:
    """The shares of both in the same bars; None for different kinds of values."""
    if now.numbers is not None and reference.numbers is not None:
        return _of_numbers(now.numbers, reference.numbers)
    if now.categories is not None and reference.categories is not None:
        return _of_categories(now.categories, reference.categories)
    return None


def _of_numbers(now: Numbers, reference: Numbers) -> Histogram:
    import numpy as np

    curves = [_cumulative(one) for one in (now, reference)]
    ends = [[np.interp(share, *curve[::-1]) for curve in curves] for share in (_TAIL, 1 - _TAIL)]
    low, high = float(min(ends[0])), float(max(ends[1]))
    with np.errstate(over="ignore", invalid="ignore"):
        edges = low + np.float64(high - low) * np.linspace(0, 1, BARS + 1)
    if not np.isfinite(edges).all() or not low < high:
        edges = np.array([low, high])
    shares = []
    for curve in curves:
        below = np.interp(edges, *curve)
        below[0], below[-1] = 0, 1
        shares.append([float(share) for share in np.diff(below)])
    between = [""] * (len(edges) - 3)
    labels = [f"{low:.6g}", *between, f"{high:.6g}"] if between else [f"{low:.6g}"]
    return Histogram(ordered=True, labels=labels, now=shares[0], reference=shares[1])


def _cumulative(numbers: Numbers) -> tuple[Array, Array]:
    """Points of the cumulative distribution: the ends of each bin, and the share below them."""
    import numpy as np

    keys = np.array(numbers.keys, np.int64)
    counts = np.array(numbers.counts, float)
    most = np.int64(np.float64(np.finfo(np.float64).max).view(np.int64) >> numbers.shift)
    upper = np.minimum(keys + 1, most) if numbers.shift else keys
    ends = np.stack([_number(keys << numbers.shift), _number(upper << numbers.shift)], axis=1)
    above = np.cumsum(counts) / counts.sum()
    shares = np.stack([np.concatenate([[0.0], above[:-1]]), above], axis=1)
    return ends.reshape(-1), shares.reshape(-1)


def _number(ordered: Array) -> Array:
    """The numbers whose bits, as ordered whole numbers, are given."""
    import numpy as np

    bits = np.where(ordered < 0, ordered ^ np.int64(2**63 - 1), ordered)
    return np.nan_to_num(bits.astype(np.int64).view(np.float64))


def _of_categories(now: Categories, reference: Categories) -> Histogram:
    columns = (now, reference)
    totals = [max(1, sum(one.counts.values()) + one.rest) for one in columns]
    shares = [
        {name: count / total for name, count in one.counts.items()}
        for one, total in zip(columns, totals, strict=True)
    ]
    names = sorted(
        set(shares[0]) | set(shares[1]),
        key=lambda name: (-max(shares[0].get(name, 0), shares[1].get(name, 0)), name),
    )[:MOST_CATEGORIES]
    found = [[one.get(name, 0.0) for name in names] for one in shares]
    rests = [max(0.0, 1 - sum(one)) for one in found]
    if max(rests) > 1e-9:
        names.append("others")
        found = [[*one, rest] for one, rest in zip(found, rests, strict=True)]
    return Histogram(ordered=False, labels=names, now=found[0], reference=found[1])


def picture(shown: Histogram) -> str:
    """The bars as inline SVG, the reference's in grey."""
    count = len(shown.labels)
    slot = _WIDTH / count
    highest = max(*shown.now, *shown.reference, 1e-9)
    bars = []
    for place, shares in enumerate(zip(shown.reference, shown.now, strict=True)):
        for side, (share, colour) in enumerate(zip(shares, (_REFERENCE, _NOW), strict=True)):
            height = _HEIGHT * share / highest
            x = place * slot + slot * (0.08 + 0.42 * side)
            bars.append(
                f'<rect x="{x:.1f}" y="{_HEIGHT - height:.1f}" width="{0.42 * slot:.1f}" '
                f'height="{height:.1f}" fill="{colour}"><title>{100 * share:.1f} %</title></rect>'
            )
    if shown.ordered:
        labels = [_label(shown.labels[0], 0, "start"), _label(shown.labels[-1], _WIDTH, "end")]
    else:
        most = max(2, int(slot / 7))
        labels = [
            _label(name[:most], (place + 0.5) * slot, "middle")
            for place, name in enumerate(shown.labels)
        ]
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT + _LINE}" width="{_WIDTH}" '
        f'role="img" aria-label="shares of the values">{"".join(bars)}{"".join(labels)}</svg>'
    )


def _label(text: str, x: float, anchor: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{_HEIGHT + _LINE - 3}" text-anchor="{anchor}" font-size="11" '
        f'fill="{MUTED}">{escape(text)}</text>'
    )
