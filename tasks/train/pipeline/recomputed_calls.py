"""Runs of a stage's calls that are made again in its backward pass, to save memory.

Of a run, the tensors that it uses from before are kept; what its calls save is made again when the
backward pass first needs some of it (`passes.recomputed`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch  # noqa: TID253 - only ranks import this

from trainwright.estimator.memory.recompute_names import ends_of, is_inside
from trainwright.estimator.trace.cuts.forward_graph import ForwardCall, ForwardGraph, TensorRef
from trainwright.tasks.errors import BadInput
from trainwright.tasks.train.passes.recomputed import PassAgain
from trainwright.tasks.train.pipeline.prepared_call import PreparedCall, TensorValues


class MadeCall(Protocol):
    """A call, or several."""

    def make(self, values: TensorValues, samples: int) -> None:
        """Make it with these tensors, add those of its result and remove those not used."""


class RecomputedCalls:
    """Consecutive calls of a pass."""

    def __init__(
        self,
        graph: ForwardGraph,
        run: range,
        calls: Sequence[PreparedCall],
        modules: Mapping[str, torch.nn.Module],
    ) -> None:
        """`calls` are those of the run. Raises BadInput if one of them can't be made again."""
        self._calls = calls
        used = {ref for one in run for ref in graph.calls[one].used()}
        self._given = sorted(ref for ref in used if ref.call < run.start)
        self._made = sorted(
            ref for ref, last in graph.last_uses.items() if ref.call in run and last >= run.stop
        )
        self._done = [ref for ref in self._given if graph.last_uses[ref] in run]
        _require_same_arguments(graph, run, self._given)
        held = {name for one in run for name in graph.calls[one].reads if name in modules}
        self._again = PassAgain(modules[name] for name in sorted(held))

    def make(self, values: TensorValues, samples: int) -> None:
        """As of a `MadeCall`."""

        def forward(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            own = dict(zip(self._given, given, strict=True))
            for call in self._calls:
                call.make(own, samples)
            return tuple(own[ref] for ref in self._made)

        made = self._again(forward, *[values[ref] for ref in self._given])
        values.update(zip(self._made, made, strict=True))
        for ref in self._done:
            del values[ref]


def with_recomputed(
    graph: ForwardGraph,
    own: range,
    calls: Sequence[PreparedCall],
    modules: Mapping[str, torch.nn.Module],
    names: Sequence[str],
) -> list[MadeCall]:
    """The calls `own` of a pass, those of modules with these names in runs that are recomputed.

    Raises BadInput for a name of which there is no call.
    """
    found: list[MadeCall] = []
    at = own.start
    for run in _runs(graph.calls, own, names):
        found += calls[at - own.start : run.start - own.start]
        inside = calls[run.start - own.start : run.stop - own.start]
        found.append(RecomputedCalls(graph, run, inside, modules))
        at = run.stop
    return [*found, *calls[at - own.start :]]


def _runs(calls: Sequence[ForwardCall], own: range, names: Sequence[str]) -> list[range]:
    """The runs of calls of these names, in order; one that begins inside another is left out."""
    found: list[range] = []
    for name in names:
        runs = list(_runs_of(calls, own, *ends_of(name)))
        if not runs:
            raise BadInput(
                f"layout.pipelines: recompute: got {name!r}; allowed: modules of the stage, as "
                "'blocks.3' or 'blocks.3..blocks.6'"
            )
        found += runs
    kept: list[range] = []
    for run in sorted(found, key=lambda one: (one.start, -one.stop)):
        if not kept or run.start >= kept[-1].stop:
            kept.append(run)
    return kept


def _runs_of(calls: Sequence[ForwardCall], own: range, first: str, last: str) -> list[range]:
    """The runs of calls from one module to another."""
    found, at = list[range](), own.start
    while at < own.stop:
        if not _makes(calls[at], first):
            at += 1
            continue
        end = _end(calls, own, at, first)
        if last != first:
            begin = next((one for one in range(end, own.stop) if _makes(calls[one], last)), None)
            if begin is None:
                break
            end = _end(calls, own, begin, last)
        found.append(range(at, end))
        at = end
    return found


def _end(calls: Sequence[ForwardCall], own: range, begin: int, module: str) -> int:
    """Where the calls of a module end that begin at a place."""
    return next((one for one in range(begin, own.stop) if not _makes(calls[one], module)), own.stop)


def _makes(call: ForwardCall, module: str) -> bool:
    """Whether a module's code makes a call, or it is a call of a module in it."""
    return module in call.path or (call.kind == "module" and is_inside(call.target, module))


def _require_same_arguments(graph: ForwardGraph, run: range, given: Sequence[TensorRef]) -> None:
    """What a run uses must be as it was when the run is made again."""
    storages = {graph.facts[ref].storage for ref in given}
    for call in graph.calls[run.start :]:
        if storages & call.mutates:
            first = graph.calls[run.start]
            what = first.target if first.kind == "module" else first.path[-1]
            raise BadInput(
                f"layout.pipelines: recompute: the model changes in place what {what} computes "
                "from; allowed: modules whose arguments stay as they are"
            )
