"""Joins recordings of one forward pass at several batch sizes into one for all. Loads torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from numbers import Integral
from typing import Any

from trainwright.estimator.trace.cuts.forward_graph import (
    ForwardCall,
    ForwardGraph,
    SampleCount,
    Size,
    TensorFacts,
    TreeTemplate,
)


class Differs(Exception):
    """Recordings differ. `path`: the modules whose code makes both calls, outermost first."""

    def __init__(self, path: tuple[str, ...], what: str) -> None:
        super().__init__(what)
        self.path, self.what = path, what


def joined(graphs: Sequence[ForwardGraph], sizes: Sequence[int]) -> ForwardGraph:
    """The pass for any number of samples, from those at `sizes`. Raises Differs."""
    _same_calls(graphs)
    first = graphs[0]
    calls: list[ForwardCall] = []
    for each in zip(*(one.calls for one in graphs), strict=True):
        at_any_size = partial(_at_any_size, sizes=sizes, path=each[0].path)
        arguments = zip(*(one.arguments for one in each), strict=True)
        named = {key: at_any_size([one.named[key] for one in each]) for key in each[0].named}
        result = at_any_size([one.result for one in each])
        calls.append(
            replace(
                each[0], arguments=tuple(map(at_any_size, arguments)), named=named, result=result
            )
        )
    root = ("",)
    return ForwardGraph(
        calls,
        _at_any_size([one.inputs for one in graphs], sizes, root),
        _at_any_size([one.outputs for one in graphs], sizes, root),
        {ref: _facts([one.facts[ref] for one in graphs], sizes) for ref in first.facts},
    )


def _same_calls(graphs: Sequence[ForwardGraph]) -> None:
    what = "makes other calls for another number of samples"
    for each in zip(*(one.calls for one in graphs), strict=False):
        if any(_what(one) != _what(each[0]) for one in each[1:]):
            raise Differs(common_path(each), what)
    if len({len(one.calls) for one in graphs}) > 1:
        raise Differs(("",), what)


def _what(call: ForwardCall) -> Any:
    return call.kind, call.target, call.path, len(call.arguments), call.named.keys()


def common_path(calls: Sequence[ForwardCall]) -> tuple[str, ...]:
    """The modules whose code makes all these calls, outermost first."""
    found: list[str] = []
    for each in zip(*(one.path for one in calls), strict=False):
        if len(set(each)) > 1:
            break
        found.append(each[0])
    return tuple(found) or ("",)


def _at_any_size(
    values: Sequence[TreeTemplate], sizes: Sequence[int], path: tuple[str, ...]
) -> TreeTemplate:
    """One template with counts of samples in place of the numbers that differ."""
    if any(_shape(one) != _shape(values[0]) for one in values[1:]):
        raise Differs(path, "passes on other kinds of values for another number of samples")
    rest = iter(list(zip(*(one.leaves() for one in values), strict=True)))
    return values[0].changed(lambda _: _one(next(rest), sizes, path))


def _shape(template: TreeTemplate) -> Any:
    inner = [_shape(one) if isinstance(one, TreeTemplate) else None for one in template.parts]
    return template.spec, inner


def _one(values: tuple[Any, ...], sizes: Sequence[int], path: tuple[str, ...]) -> Any:
    if all(one is values[0] or _equal(one, values[0]) for one in values[1:]):
        return values[0]
    found = None
    if all(isinstance(one, Integral) and not isinstance(one, bool) for one in values):
        found = _count([int(one) for one in values], sizes)
    if found is None:
        raise Differs(path, f"passes on {values[0]!r}, which depends on the number of samples")
    return found


def _equal(one: Any, two: Any) -> bool:
    return type(one) is type(two) and bool(one == two or (one != one and two != two))


def _count(values: Sequence[int], sizes: Sequence[int]) -> Size | None:
    """The line through whole numbers at these sizes; None if there is none."""
    per_sample, rest = divmod(values[1] - values[0], sizes[1] - sizes[0])
    found = SampleCount(values[0] - per_sample * sizes[0], per_sample)
    if rest or any(found(size) != one for size, one in zip(sizes, values, strict=True)):
        return None
    return found if per_sample else values[0]


def _facts(facts: Sequence[TensorFacts], sizes: Sequence[int]) -> TensorFacts:
    shapes = [[int(size) for size in one.shape] for one in facts if one.shape is not None]  # type: ignore[arg-type]
    if len(shapes) < len(facts) or len({*map(len, shapes)}) > 1:
        return facts[0]._replace(shape=None)
    lines = [_count(each, sizes) for each in zip(*shapes, strict=True)]
    known = tuple(one for one in lines if one is not None)
    return facts[0]._replace(shape=known if len(known) == len(lines) else None)
