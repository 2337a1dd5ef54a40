"""Whether a source's loss is the mean that ranks and micro-batches take it for.

The loss of some real rows of targets is compared with the weighted loss of two parts of them. The
outputs are random numbers of the model's shapes: so the model does not run, and its batch norms and
dropout change nothing.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch  # noqa: TID253 - this is a separate process

from trainwright.estimator.trace.batch_loss import IGNORED, BatchLoss
from trainwright.estimator.trace.checked_rows import CheckedRows, RealRows, RowsThroughModel
from trainwright.estimator.trace.output_forms import of_a_sample

_log = logging.getLogger(__name__)
_CLOSE, _APART, _ALIKE = 1e-4, 1e-3, 1e-2
"""relative: losses are equal; losses differ; shares of weights are equal, absolute"""
_DRAWS, _TINY = 4, 1e-30
_BY_SAMPLES = "ranks and micro-batches count by samples, so that another model is trained"


def loss_notice(
    loss: BatchLoss,
    small: tuple[int, Any],
    large: tuple[int, Any],
    rows: RealRows,
    build: Callable[[], torch.nn.Module] | None = None,
) -> str:
    """What is wrong with a loss, and what to add; empty: nothing, or it can't be told.

    `small` and `large`: samples, and forms of the outputs. `rows`: some with unlike numbers of what
    counts. If the outputs have no samples, as those of a model that computes its loss, what `build`
    makes runs on the rows' inputs, as in evaluation.
    """
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            checked = CheckedRows(loss, of_a_sample(small, large), rows.targets)
            if not checked.most_rows and rows.inputs is not None and build is not None:
                checked = RowsThroughModel(loss, build().eval(), rows)
            count = min(checked.most_rows, checked.count)
            if count >= 2:
                checked.choose(count)
                return _judged(checked)
    except Exception:  # noqa: BLE001 - the user's code may not take such outputs
        _log.info("the loss is not checked", exc_info=True)
    return ""


@dataclass(frozen=True)
class _TwoParts:
    """The losses of all rows, and of the first and the other ones, each with its weight."""

    rows: tuple[int, int]
    whole: tuple[float, float]
    first: tuple[float, float]
    others: tuple[float, float]

    @property
    def joined(self) -> float:
        """The loss that ranks with these two parts have together."""
        parts = [part for part in (self.first, self.others) if part[1]]
        weight = sum(weight for _, weight in parts)
        return sum(mean * weight for mean, weight in parts) / weight if weight else math.nan

    @property
    def error(self) -> float:
        """How far the joined loss is from that of all rows, relative; infinite if it is none."""
        if not self.whole[1] and math.isnan(self.joined):
            return 0.0
        error = abs(self.joined - self.whole[0]) / max(self._size, _TINY)
        return math.inf if math.isnan(error) else error

    @property
    def is_sum(self) -> bool:
        return _close(self.first[0] + self.others[0], self.whole[0], self._size)

    @property
    def _size(self) -> float:
        known = (abs(one) for one, _ in (self.whole, self.first, self.others) if one == one)
        return max(known, default=0.0)

    @property
    def share(self) -> float | None:
        """w_others / (w_first + w_others), if the loss is a mean by weights; None: it is none.

        NaN if both parts have about the same loss.
        """
        (whole, _), (first, _), (others, _) = self.whole, self.first, self.others
        if math.isnan(first) or math.isnan(others):  # a part without any weight
            left, share = (others, 1.0) if math.isnan(first) else (first, 0.0)
            return share if _close(left, whole, self._size) else None
        if abs(others - first) <= _APART * self._size:
            return math.nan
        found = (whole - first) / (others - first)
        return found if -_ALIKE < found < 1 + _ALIKE else None


def _close(one: float, other: float, size: float) -> bool:
    return abs(one - other) <= _CLOSE * max(size, _TINY)


def _judged(checked: CheckedRows) -> str:
    drawn = _drawer(checked)
    if drawn is None:
        return ""
    drawn(0)
    if checked.of(slice(None), 0) != checked.of(slice(None), 1):
        return ""  # a loss that draws random numbers
    cuts = sorted(
        {1, max(1, checked.count // 3), max(1, 2 * checked.count // 3), checked.count - 1}
    )
    draws = [_divisions(checked, cuts)]
    wrong = max(draws[0], key=lambda one: one.error)
    if wrong.error <= _CLOSE:
        return ""
    for seed in range(1, _DRAWS):
        drawn(seed)
        draws.append(_divisions(checked, cuts))
    if all(one.is_sum for draw in draws for one in draw):
        return _told(wrong, f"it is a sum; {_BY_SAMPLES}; return (sum, len(targets)) from loss")
    shares = [_known_share([one.share for one in cut]) for cut in zip(*draws, strict=True)]
    if None in shares:
        return _told(
            wrong,
            "a sample's loss depends on other samples (contrastive losses, roots of means), which "
            "no weight mends; ranks and micro-batches compute it of their own samples, so that "
            "another model is trained, unless one device (devices.max_count: 1) takes a whole "
            "batch at once",
        )
    if wrong.whole[1] != checked.count:
        return _told(wrong, "its weight is not what it is divided by; return (sum, weight)")
    by_cut = [(cut, share) for cut, share in zip(cuts, shares, strict=True) if share is not None]
    return _told(wrong, f"{_BY_SAMPLES}; {_line_to_add(checked.targets, by_cut)}")


def _told(divided: _TwoParts, why: str) -> str:
    first, others, whole = (
        f"{one:.4g}" for one, _ in (divided.first, divided.others, divided.whole)
    )
    return (
        f"loss: {first} of {divided.rows[0]} rows and {others} of {divided.rows[1]} others give "
        f"{whole} of all, not {divided.joined:.4g}: it is no mean over samples; {why}"
    )


def _drawer(checked: CheckedRows) -> Callable[[int], None] | None:
    """What draws outputs for which the loss is a number; None if none does."""
    for dtype, positive in itertools.product(checked.types, (False, True)):
        draw = functools.partial(checked.draw, positive=positive, dtype=dtype)
        # The loss may take another type only, or only probabilities.
        try:
            draw(0)
            if math.isfinite(checked.of(slice(None))[0]):
                return draw
        except Exception:  # noqa: BLE001 - the user's code
            _log.info("the loss takes no outputs of %s", dtype, exc_info=True)
    return None


def _divisions(checked: CheckedRows, cuts: Sequence[int]) -> list[_TwoParts]:
    whole = checked.of(slice(None))
    return [
        _TwoParts(
            (cut, checked.count - cut), whole, checked.of(slice(cut)), checked.of(slice(cut, None))
        )
        for cut in cuts
    ]


def _known_share(shares: Sequence[float | None]) -> float | None:
    """The share of some draws; None if outputs change it, NaN if it is not known."""
    known = [one for one in shares if one is None or not math.isnan(one)]
    numbers = [one for one in known if one is not None]
    if len(numbers) < len(known) or (numbers and max(numbers) - min(numbers) > _ALIKE):
        return None
    return statistics.median(numbers) if len(numbers) > 1 else math.nan


def _line_to_add(targets: Any, shares: Sequence[tuple[int, float]]) -> str:
    """How the source can give the weights."""
    generic = (
        "return a pair (sum, weight) from loss, or add to the model's source def "
        "loss_weight(targets): what it divides by"
    )
    if not isinstance(targets, torch.Tensor):
        return generic
    common = targets.flatten().mode().values.item()
    left_out = (IGNORED, -1, 0, common)
    counts = {f"(targets != {value:g}).sum()": targets != value for value in left_out}
    counts |= {"(targets >= 0).sum()": targets >= 0, "(targets > 0).sum()": targets > 0}
    for expression, counted in counts.items():
        by_row = counted.reshape(len(targets), -1).sum(1).double()
        of_others = [float(by_row[cut:].sum() / by_row.sum()) for cut, _ in shares]
        known = zip(of_others, shares, strict=True)
        if all(abs(one - share) <= _ALIKE for one, (_, share) in known if not math.isnan(share)):
            return f"add to the model's source: def loss_weight(targets): return {expression}"
    return generic
