"""The loss of some real rows, with random outputs, or with those of the model on their inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch  # noqa: TID253 - this is a separate process
from torch.utils._pytree import tree_leaves, tree_map_only  # noqa: TID253

from trainwright.estimator.trace.batch_loss import BatchLoss
from trainwright.estimator.trace.output_forms import TensorForm

MOST_ROWS = 64
_OUTPUTS, _MOST_OUTPUTS, _MOST_DOUBLE = 1 << 24, 1 << 27, 1 << 23
"""numbers in the outputs of all rows; of `_LEAST_ROWS` at most; in double precision"""
_LEAST_ROWS, _MODEL_ROWS = 3, 16


@dataclass(frozen=True)
class RealRows:
    """Rows of the data."""

    targets: Any
    inputs: Any = None
    """None: not known"""


class CheckedRows:
    """The loss of some of the rows."""

    def __init__(self, loss: BatchLoss, forms: Any, targets: Any) -> None:
        self._loss, self._forms, self._targets = loss, forms, targets
        self._inputs: Any = None
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
        # A part must not have all rows of a kind.
        chosen = chosen[torch.randperm(count, generator=torch.Generator().manual_seed(0))]
        self._targets = _taken(self._targets, chosen, self.count)
        self._inputs, self.count = _taken(self._inputs, chosen, self.count), count

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
        outputs, targets = self._outputs_of(index), _taken(self._targets, index, self.count)
        mean, weight = self._loss.weighted(outputs, targets, len(index))
        return float(mean), weight

    def _outputs_of(self, index: torch.Tensor) -> Any:
        forms = iter([one for one in tree_leaves(self._forms) if isinstance(one, TensorForm)])

        def taken(one: torch.Tensor) -> torch.Tensor:
            return _rows_of(one, index, self.count) if next(forms).shape[0] else one

        return tree_map_only(torch.Tensor, taken, self._outputs)

    @property
    def targets(self) -> Any:
        """The rows' targets."""
        return self._targets


class RowsThroughModel(CheckedRows):
    """With the outputs of the model itself; other ones of other parameters."""

    types = (torch.float32,)

    def __init__(self, loss: BatchLoss, model: torch.nn.Module, rows: RealRows) -> None:
        super().__init__(loss, (), rows.targets)
        self._model, self._inputs, self.most_rows = model, rows.inputs, _MODEL_ROWS

    def draw(self, seed: int, *, positive: bool, dtype: torch.dtype) -> None:
        """Change the parameters a little, but for the first draw."""
        chance = torch.Generator().manual_seed(seed)
        for one in self._model.parameters() if seed else ():
            one.add_(torch.randn(one.shape, generator=chance) * one.abs().mean() / 2)

    def _outputs_of(self, index: torch.Tensor) -> Any:
        return self._model(_taken(self._inputs, index, self.count))


def _first(tree: Any) -> Any:
    return next((one for one in tree_leaves(tree) if isinstance(one, torch.Tensor)), None)


def _taken(tree: Any, index: torch.Tensor, count: int) -> Any:
    """Some samples of all tensors that have rows for each."""

    def taken(one: torch.Tensor) -> torch.Tensor:
        return _rows_of(one, index, count) if one.dim() and len(one) % count == 0 else one

    return tree_map_only(torch.Tensor, taken, tree)


def _rows_of(tensor: torch.Tensor, index: torch.Tensor, count: int) -> torch.Tensor:
    found: torch.Tensor = tensor.unflatten(0, (count, -1))[index].flatten(0, 1)
    return found
