"""A step's operations as arrays, by family of cost: the input of cost models. Loads no torch.

Some quantities on which an operation's time depends belong to the whole step (`InStep`). Small
operations are faster the more often the step calls their kind: `calls`. Their tensors are more
often in a cache if the whole step moves fewer bytes: `step_bytes`. Adam's square root of a table's
second moments takes many times as long for a zero as for another value (MKL's vector mathematics),
so its time depends on `zeros_in_ten`, the number of zeros in ten values. Rows that no sample has
looked up are zero. This is true for the first steps of a training, which calibration measures; if
later steps look up other rows, they become faster.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainwright.estimator.curves import Affine
from trainwright.estimator.structure import Operation, Structure

_LARGE = ("conv", "conv_backward", "matmul", "attention", "rnn")
_MOVES_NOTHING = "view"
_TABLE_GRADIENTS = ("aten.embedding_dense_backward", "aten._embedding_bag_backward")
_PRODUCTS, _SUM, _ROOT = ("aten.mm", "aten.addmm"), "aten.add", "aten.sqrt"


@dataclass(frozen=True)
class FamilyWork:
    """The operations of one family at one batch size.

    Arrays have an entry for each group of similar ones.
    """

    kinds: tuple[str, ...]
    counts: Any
    flops: Any
    bytes: Any
    dims: Mapping[str, Any]
    places: tuple[int, ...] = ()
    """the groups' indices in the structure's trace, if it has one"""

    def points(self, names: Sequence[str], flops_factor: float = 1.0) -> Any:
        """The coordinates of the operations: logarithms of FLOPs, bytes and the sizes `names`.

        Shape: (operations, 2 + names). A size that an operation does not have is 0.
        """
        import numpy as np

        none = np.zeros(len(self.kinds))
        columns = [
            flops_factor * self.flops,
            self.bytes,
            *(self.dims.get(name, none) for name in names),
        ]
        return np.log1p(np.column_stack(columns))


@dataclass(frozen=True)
class _Lines:
    """Values as lines over the batch size: fixed + per_sample · b, arrays of equal shape."""

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
        places: dict[str, list[int]] = {}
        for place, one in enumerate(structure.trace):
            calls[known_as(one)] += one.count
            groups = one.dims.get("groups")
            family = cost_family(
                one.family, {"groups": groups(structure.batch_size)} if groups else {}
            )
            families.setdefault(family, []).append(one)
            places.setdefault(family, []).append(place)
        moved = [
            sum(one.count * getattr(one.bytes, part) for one in structure.trace)
            for part in ("fixed", "per_sample")
        ]
        self._families = {}
        for family, members in families.items():
            names = sorted({name for one in members for name in one.dims})
            lines = {name: _lines([one.dims.get(name) for one in members]) for name in names}
            kinds = tuple(known_as(one) for one in members)
            if members[0].family not in _LARGE:
                lines["calls"] = _Lines(np.array([float(calls[kind]) for kind in kinds]), 0.0)
                if members[0].family != _MOVES_NOTHING:
                    lines["step_bytes"] = _Lines(*(np.full(len(kinds), part) for part in moved))
            self._families[family] = (
                kinds,
                np.array([float(one.count) for one in members]),
                _lines([one.flops for one in members]),
                _lines([one.bytes for one in members]),
                lines,
                tuple(places[family]),
            )
        tells = (*_TABLE_GRADIENTS, *_PRODUCTS, _SUM, _ROOT)
        has_tables = any(one.kind in _TABLE_GRADIENTS for one in structure.trace)
        self._of_tables = (
            [one for one in structure.trace if one.kind in tells] if has_tables else []
        )

    def __call__(self, batch_size: int) -> dict[str, FamilyWork]:
        """The work at a batch size, by family of cost."""
        work = {
            family: FamilyWork(
                kinds,
                counts,
                flops(batch_size),
                moved(batch_size),
                {name: line(batch_size) for name, line in dims.items()},
                of_trace,
            )
            for family, (kinds, counts, flops, moved, dims, of_trace) in self._families.items()
        }
        zeros = zeros_of_tables(
            (known_as(one), one.count, {name: line(batch_size) for name, line in one.dims.items()})
            for one in self._of_tables
        )
        if not zeros:
            return work
        return {
            family: _with_zeros(one, zeros) if _ROOT in one.kinds else one
            for family, one in work.items()
        }


def _with_zeros(work: FamilyWork, zeros: Mapping[int, float]) -> FamilyWork:
    import numpy as np

    given = work.dims["given"].tolist() if "given" in work.dims else [0.0] * len(work.kinds)
    of_each = np.array(
        [
            zeros.get(round(size), 0.0) if kind == _ROOT else 0.0
            for kind, size in zip(work.kinds, given, strict=True)
        ]
    )
    in_ten = 10 * of_each / np.maximum(given, 1.0)
    # Calibrations of schema version 7 use `zeros`.
    return replace(work, dims={**work.dims, "zeros": of_each, "zeros_in_ten": in_ten})


def _lines(lines: Sequence[Affine | None]) -> _Lines:
    """Lines as arrays; a missing line is 0.

    The arrays are made from flat numbers: pairs would cause garbage collections.
    """
    import numpy as np

    fixed = np.fromiter((one.fixed if one else 0.0 for one in lines), float, len(lines))
    return _Lines(
        fixed, np.fromiter((one.per_sample if one else 0.0 for one in lines), float, len(lines))
    )


def known_as(one: Operation) -> str:
    """The kind by calibration's name: in half precision it is another operation."""
    return f"{one.kind} in {one.dtype}" if one.dtype in ("bfloat16", "float16") else one.kind


def cost_family(family: str, dims: Mapping[str, float]) -> str:
    """The family whose costs an operation shares: grouped convolutions have their own."""
    return f"grouped {family}" if dims.get("groups", 1.0) > 1 else family


class InStep:
    """The quantities of a whole step, from its operations (kind, count, bytes, dims)."""

    def __init__(self, rows: Sequence[tuple[str, int, float, Mapping[str, float]]]) -> None:
        self._calls = Counter[str]()
        for kind, count, _, _ in rows:
            self._calls[kind] += count
        self._bytes = sum(count * moved for _, count, moved, _ in rows)
        self._zeros = zeros_of_tables((kind, count, dims) for kind, count, _, dims in rows)

    def sizes(self, kind: str, family: str, dims: Mapping[str, float]) -> dict[str, float]:
        """All sizes on which an operation's time depends: the operation's and the step's."""
        if family in _LARGE:
            return dict(dims)
        step_sizes = {"calls": float(self._calls[kind])}
        if family != _MOVES_NOTHING:
            step_sizes["step_bytes"] = self._bytes
        given = dims.get("given", 0.0)
        if kind == _ROOT and (zeros := self._zeros.get(round(given))):
            step_sizes["zeros_in_ten"] = 10 * zeros / given
        return {**dims, **step_sizes}


def zeros_of_tables(operations: Iterable[tuple[str, int, Mapping[str, float]]]) -> dict[int, float]:
    """The number of values of each table that no sample looks up, by the table's size.

    The arguments are a step's operations (kind, count, dims). If a step looks up n of R rows at
    random, R · exp(−n / R) remain. A table is left out if something else contributes to its
    gradient, such as a head that shares its parameters or weight decay: then no value is zero.
    """
    picked, rows, roots, dense = Counter[int](), dict[int, float](), Counter[int](), set[int]()
    for kind, count, dims in operations:
        if kind in _TABLE_GRADIENTS and dims.get("made", 0.0) > 0 and dims.get("last", 0.0) > 0:
            size = round(dims["made"])
            picked[size] += round(count * max(0.0, dims.get("picked", 0.0)))
            rows[size] = dims["made"] / dims["last"]
        elif kind == _ROOT:
            roots[round(dims.get("given", 0.0))] += count
        elif kind == _SUM:
            dense.add(round(dims.get("made", 0.0)))
        elif kind in _PRODUCTS:
            dense.add(round(dims.get("rows", 0.0) * dims.get("columns", 0.0)))
    return {
        size: size * math.exp(-picked[size] / roots[size] / of)
        for size, of in rows.items()
        if roots[size] and size not in dense
    }


def by_family(
    rows: Sequence[tuple[str, str, int, float, float, Mapping[str, float]]],
) -> dict[str, FamilyWork]:
    """The work of a step's operations (family, kind, count, flops, bytes, dims), by family."""
    import numpy as np

    step, groups = (
        InStep([(row[1], row[2], row[4], row[5]) for row in rows]),
        dict[str, list[Any]](),
    )
    for row in rows:
        dims = step.sizes(row[1], row[0], row[5])
        groups.setdefault(cost_family(row[0], dims), []).append((*row[1:5], dims))
    return {
        family: FamilyWork(
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
