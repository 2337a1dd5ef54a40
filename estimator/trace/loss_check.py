"""Whether a source's loss is the mean that ranks and micro-batches take it for.

The loss of some real rows of targets is compared with the weighted loss of two parts of them. The
outputs are random numbers of the model's shapes: so the model does not run, and its batch norms and
dropout change nothing.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch  # noqa: TID253 - this is a separate process
from torch.utils._pytree import tree_leaves, tree_map_only  # noqa: TID253

from trainwright.estimator.trace.batch_loss import IGNORED, BatchLoss
from trainwright.estimator.trace.output_forms import TensorForm, of_a_sample

MOST_ROWS = 64
_OUTPUTS, _MOST_OUTPUTS, _MOST_DOUBLE = 1 << 24, 1 << 27, 1 << 23
"""numbers in the outputs of all rows; of `_LEAST_ROWS` at most; in double precision"""
_LEAST_ROWS = 3
_CLOSE, _APART, _ALIKE = 1e-4, 1e-3, 1e-2
"""relative: losses are equal; losses differ; shares of weights are equal, absolute"""
_DRAWS, _TINY = 4, 1e-30
_BY_SAMPLES = "ranks and micro-batches count by samples, so that another model is trained"


def loss_notice(
    loss: BatchLoss, small: tuple[int, Any], large: tuple[int, Any], targets: Any
) -> str:
    """What is wrong with a loss, and what to add; empty: nothing, or it can't be told.

    `small` and `large`: samples, and forms of the outputs. `targets`: real rows, some of them with
    unlike numbers of what counts.
    """
    parts = _Parts(loss, of_a_sample(small, large), targets)
    count = min(parts.most_rows, parts.count)
    if count < 2:
        return ""
    parts.choose(count)
    # The user's code may not take such outputs; training then says what it takes.
    with contextlib.suppress(Exception), torch.random.fork_rng(devices=[]), torch.no_grad():
        return _judged(parts)
    return ""


class _Parts:
    """The loss of some of the rows."""

    def __init__(self, loss: BatchLoss, forms: Any, targets: Any) -> None:
        self._loss, self._forms, self._targets = loss, forms, targets
        leaves = [one for one in tree_leaves(forms) if isinstance(one, TensorForm)]
        per_sample = sum(math.prod(one.shape) for one in leaves if one.shape[0])
        fits = per_sample and _LEAST_ROWS * per_sample <= _MOST_OUTPUTS
        self.most_rows = max(_LEAST_ROWS, min(MOST_ROWS, _OUTPUTS // per_sample)) if fits else 0
        self.count = len(_first(targets)) if _first(targets) is not None else 0
        self._per_sample = per_sample
        self._outputs: Any = None

    @property
    def types(self) -> Sequence[torch.dtype]:
        """In which outputs may be drawn, the best first."""
        double = self.count * self._per_sample <= _MOST_DOUBLE
        return [torch.float64, torch.float32] if double else [torch.float32]

    def choose(self, count: int) -> None:
        """Keep so many rows, as unlike as possible in how often they have the commonest value."""
        first = _first(self._targets).reshape(self.count, -1)
        often = (first == first.flatten().mode().values).sum(1)
        order = torch.argsort(often, stable=True)
        chosen = order[torch.linspace(0, self.count - 1, count).round().long()]
        self._targets = _taken(self._targets, chosen, self.count)
        # A part must not have all rows of a kind.
        mixed = torch.randperm(count, generator=torch.Generator().manual_seed(0))
        self._targets, self.count = _taken(self._targets, mixed, count), count

    def draw(self, seed: int, *, positive: bool, dtype: torch.dtype) -> None:
        """Other outputs for all rows."""
        chance = torch.Generator().manual_seed(seed)

        def random(one: TensorForm) -> torch.Tensor:
            rows, *rest = one.shape
            shape = (rows * self.count, *rest) if rows else tuple(rest)
            if one.dtype.is_floating_point:
                values = torch.rand if positive else torch.randn
                return values(shape, generator=chance, dtype=dtype)
            fixed = torch.Generator().manual_seed(0)  # such as masks, which are of the inputs
            return torch.randint(2, shape, generator=fixed).to(one.dtype)

        self._outputs = tree_map_only(TensorForm, random, self._forms)

    def of(self, rows: slice, seed: int = 0) -> tuple[float, float]:
        """The mean loss of some rows, and its weight."""
        torch.manual_seed(seed)
        index = torch.arange(self.count)[rows]
        forms = iter([one for one in tree_leaves(self._forms) if isinstance(one, TensorForm)])

        def taken(one: torch.Tensor) -> torch.Tensor:
            return _rows_of(one, index, self.count) if next(forms).shape[0] else one

        outputs = tree_map_only(torch.Tensor, taken, self._outputs)
        targets = _taken(self._targets, index, self.count)
        mean, weight = self._loss.weighted(outputs, targets, len(index))
        return float(mean), weight

    @property
    def targets(self) -> Any:
        """The rows' targets."""
        return self._targets


def _first(tree: Any) -> Any:
    return next((one for one in tree_leaves(tree) if isinstance(one, torch.Tensor)), None)


def _taken(tree: Any, index: torch.Tensor, count: int) -> Any:
    """Some samples of all tensors that have rows for each."""

    def taken(one: torch.Tensor) -> torch.Tensor:
        return _rows_of(one, index, count) if one.dim() and len(one) % count == 0 else one

    return tree_map_only(torch.Tensor, taken, tree)


def _rows_of(tensor: torch.Tensor, index: torch.Tensor, count: int) -> torch.Tensor:
    return tensor.unflatten(0, (count, -1))[index].flatten(0, 1)


@dataclass(frozen=True)
class _Division:
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


def _judged(parts: _Parts) -> str:
    drawn = _drawer(parts)
    if drawn is None:
        return ""
    drawn(0)
    if parts.of(slice(None), 0) != parts.of(slice(None), 1):
        return ""  # a loss that draws random numbers
    cuts = sorted({1, max(1, parts.count // 3), max(1, 2 * parts.count // 3), parts.count - 1})
    draws = [_divisions(parts, cuts)]
    wrong = max(draws[0], key=lambda one: one.error)
    if wrong.error <= _CLOSE:
        return ""
    for seed in range(1, _DRAWS):
        drawn(seed)
        draws.append(_divisions(parts, cuts))
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
    if wrong.whole[1] != parts.count:
        return _told(wrong, "its weight is not what it is divided by; return (sum, weight)")
    by_cut = [(cut, share) for cut, share in zip(cuts, shares, strict=True) if share is not None]
    return _told(wrong, f"{_BY_SAMPLES}; {_line_to_add(parts.targets, by_cut)}")


def _told(division: _Division, why: str) -> str:
    first, others, whole = (
        f"{one:.4g}" for one, _ in (division.first, division.others, division.whole)
    )
    return (
        f"loss: {first} of {division.rows[0]} rows and {others} of {division.rows[1]} others give "
        f"{whole} of all, not {division.joined:.4g}: it is no mean over samples; {why}"
    )


def _drawer(parts: _Parts) -> Callable[[int], None] | None:
    """What draws outputs for which the loss is a number; None if none does."""
    for dtype, positive in itertools.product(parts.types, (False, True)):
        draw = functools.partial(parts.draw, positive=positive, dtype=dtype)
        # The loss may take another type only, or only probabilities.
        with contextlib.suppress(Exception):
            draw(0)
            if math.isfinite(parts.of(slice(None))[0]):
                return draw
    return None


def _divisions(parts: _Parts, cuts: Sequence[int]) -> list[_Division]:
    whole = parts.of(slice(None))
    return [
        _Division((cut, parts.count - cut), whole, parts.of(slice(cut)), parts.of(slice(cut, None)))
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
