"""Tensors of which each rank of a group holds some rows, at dimension 0; it may hold none."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch  # noqa: TID253 - only ranks import this

from trainwright.tasks.train.exchange.group_exchange import Exchange
from trainwright.tasks.train.exchange.rank_group import RankGroup

Cuts = Sequence[tuple[int, int]]
"""The rows [begin, end) of each rank."""


def blank(shape: Collection[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of this shape without memory for its values, all of which are one NaN or zero."""
    real = dtype.is_floating_point or dtype.is_complex
    return torch.full((), float("nan") if real else 0, dtype=dtype).expand(tuple(shape))


def is_blank(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no memory for its values (`blank`)."""
    return tensor.numel() > 1 and not any(
        stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1
    )


class CutTensors:
    """Tensors with equally many rows, of which a rank holds its own from `cut` on.

    They remain the same objects, so that modules and the optimizer keep them.
    """

    def __init__(
        self,
        name: str,
        parameters: Mapping[str, torch.nn.Parameter],
        exchange: Exchange | RankGroup,
        before: CutTensors | None = None,
    ) -> None:
        """`exchange`: the ranks that hold rows.

        `before`: the same tensors in another layout, whose rows they have.
        """
        self.name, self.parameters, self._exchange = name, dict(parameters), exchange
        """by name: those that are cut"""
        total = max(len(one) for one in self.parameters.values())
        self.total: int = total if before is None else before.total
        self.cuts: Cuts | None = None if before is None else before.cuts
        """None: this rank holds all rows"""
        self.own: tuple[int, int] = (0, self.total) if before is None else before.own
        """the rows [begin, end) that this rank holds"""

    def cut(self, cuts: Cuts, device: torch.device) -> None:
        """Keep this rank's rows only, on its device. Raises RuntimeError if it has other ones."""
        if self.cuts is not None:
            if [*self.cuts] != [*cuts]:
                raise RuntimeError(f"{self.name}: has rows {self.own}, cut by {self.cuts}")
            return
        if self.is_blank:
            raise RuntimeError(f"{self.name}: has no rows yet")
        self.cuts, self.own = cuts, cuts[self._exchange.rank]
        for parameter in self.parameters.values():
            parameter.grad = None
            parameter.data = self.own_rows(parameter.data, device)

    def is_part(self, total: int, cuts: Cuts) -> None:
        """The tensors are this rank's rows of these cuts already, of so many rows."""
        self.total, self.cuts, self.own = total, cuts, cuts[self._exchange.rank]

    def hold(self, cuts: Cuts | None, rows: Mapping[str, torch.Tensor]) -> None:
        """Hold these rows from now on, by name: this rank's of some cuts; None: all."""
        self.cuts = cuts
        self.own = (0, self.total) if cuts is None else cuts[self._exchange.rank]
        for name, parameter in self.parameters.items():
            parameter.grad = None
            parameter.data = rows[name]

    def forget(self) -> None:
        """Hold no values, until `hold` gives some."""
        self.cuts, self.own = None, (0, self.total)
        for parameter in self.parameters.values():
            parameter.grad = None
            parameter.data = blank([self.total, *parameter.shape[1:]], parameter.dtype)

    @property
    def is_blank(self) -> bool:
        """Whether this rank has no values: as if it held all rows, but they are still to come."""
        return any(map(is_blank, self.parameters.values()))

    def own_rows(self, whole: torch.Tensor, device: torch.device) -> torch.Tensor:
        """This rank's part of a whole tensor, a copy."""
        begin, end = self.own
        return whole[begin:end].to(device, copy=True)

    @property
    def rows_held(self) -> int:
        """How many rows this rank has; all if it is not cut."""
        return self.own[1] - self.own[0]
