"""A step's operations as arrays, by family of cost: what costs are computed of. Loads no torch.

In a step, small operations are the quicker the oftener it calls their kind: that is one of the sizes that their time depends on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainwright.estimator.curves import Affine
from trainwright.estimator.structure import Operation, Structure

_LARGE = ("conv", "conv_backward", "matmul", "attention", "rnn")


@dataclass(frozen=True)
class Work:
    """The operations of one family, for one batch size. Arrays have a place for each group of alike ones."""

    kinds: tuple[str, ...]
    counts: Any
    flops: Any
    bytes: Any
    dims: Mapping[str, Any]

    def points(self, names: Sequence[str], flops_factor: float = 1.0) -> Any:
        """Where the operations lie among others of the family: logarithms of FLOPs, bytes and the sizes `names`.

        Shape: (operations, 2 + names). A size that an operation does not have is 0.
        """
        import numpy as np

        none = np.zeros(len(self.kinds))
        columns = [flops_factor * self.flops, self.bytes, *(self.dims.get(name, none) for name in names)]
        return np.log1p(np.column_stack(columns))


@dataclass(frozen=True)
class _Lines:
    """Values over the batch size: fixed + per_sample · b, arrays of equal shape."""

    fixed: Any
    per_sample: Any

    def __call__(self, batch_size: int) -> Any:
        return self.fixed + self.per_sample * batch_size


class StepWork:
    """The work of a structure's step, at any batch size."""

    def __init__(self, structure: Structure) -> None:
        import numpy as np

        calls = Counter[str]()
        families: dict[str, list[Operation]] = {}
        for one in structure.trace:
            calls[known_as(one)] += one.count
            groups = one.dims.get("groups")
            family = cost_family(one.family, {"groups": groups(structure.batch_size)} if groups else {})
            families.setdefault(family, []).append(one)
        self._families = {}
        for family, members in families.items():
            names = sorted({name for one in members for name in one.dims})
            lines = {name: _lines([one.dims.get(name) for one in members]) for name in names}
            kinds = tuple(known_as(one) for one in members)
            if members[0].family not in _LARGE:
                lines["calls"] = _Lines(np.array([float(calls[kind]) for kind in kinds]), 0.0)
            self._families[family] = (
                kinds,
                np.array([float(one.count) for one in members]),
                _lines([one.flops for one in members]),
                _lines([one.bytes for one in members]),
                lines,
            )

    def __call__(self, batch_size: int) -> dict[str, Work]:
        """By family of cost."""
        return {
            family: Work(
                kinds, counts, flops(batch_size), moved(batch_size), {name: line(batch_size) for name, line in dims.items()}
            )
            for family, (kinds, counts, flops, moved, dims) in self._families.items()
        }  # fmt: skip


def _lines(lines: Sequence[Affine | None]) -> _Lines:
    """As arrays; of what has no such line, 0. Made of numbers, not of pairs: those would set off collections of garbage."""
    import numpy as np

    fixed = np.fromiter((one.fixed if one else 0.0 for one in lines), float, len(lines))
    return _Lines(fixed, np.fromiter((one.per_sample if one else 0.0 for one in lines), float, len(lines)))


def known_as(one: Operation) -> str:
    """The kind as calibration names it: what computes in half precision is another operation."""
    return f"{one.kind} in {one.dtype}" if one.dtype in ("bfloat16", "float16") else one.kind


def cost_family(family: str, dims: Mapping[str, float]) -> str:
    """What an operation's time is like: convolutions in groups are far from the others."""
    return f"grouped {family}" if dims.get("groups", 1.0) > 1 else family


def in_step(family: str, dims: dict[str, float], calls: int) -> dict[str, float]:
    """The sizes that an operation's time depends on, with how often the step calls its kind."""
    return dims if family in _LARGE else dims | {"calls": float(calls)}


def by_family(rows: Sequence[tuple[str, str, int, float, float, Mapping[str, float]]]) -> dict[str, Work]:
    """A step's operations (family, kind, count, flops, bytes, dims) by family of cost."""
    import numpy as np

    calls = Counter[str]()
    groups: dict[str, list[Any]] = {}
    for row in rows:
        calls[row[1]] += row[2]
    for row in rows:
        dims = in_step(row[0], dict(row[5]), calls[row[1]])
        groups.setdefault(cost_family(row[0], dims), []).append((*row[1:5], dims))
    return {
        family: Work(
            kinds=tuple(row[0] for row in members),
            counts=np.array([float(row[1]) for row in members]),
            flops=np.array([row[2] for row in members]),
            bytes=np.array([row[3] for row in members]),
            dims={
                name: np.array([row[4].get(name, 0.0) for row in members])
                for name in sorted({name for row in members for name in row[4]})
            },
        )
        for family, members in groups.items()
    }
