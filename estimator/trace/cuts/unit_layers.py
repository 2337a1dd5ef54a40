"""Which layers of a structure compute in which unit. Loads torch."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Sequence

from trainwright.estimator.structure import LayerFacts, Unit
from trainwright.estimator.trace.cuts.forward_graph import ForwardCall, ForwardGraph
from trainwright.estimator.trace.cuts.model_cuts import CutModel

_SAMPLES = 16
"""The number of samples for which results are compared."""


def units_with_layers(cut: CutModel, layers: Sequence[LayerFacts], model: str) -> list[Unit]:
    """The units, with the names of the layers in them and of tied parameters.

    Each layer is in one unit. `model` is the name of the model itself among the layers.
    """
    if not cut.units:
        return []
    names: list[list[str]] = [[] for _ in cut.units]
    own: list[set[str]] = [set() for _ in cut.units]
    for layer in layers:
        unit = _unit_of(cut, layer, "" if layer.name == model else layer.name)
        names[unit].append(layer.name)
        own[unit] |= layer.parameters.keys()
    return [
        one.model_copy(update={"layers": names[place], "tied": sorted(used - own[place])})
        for place, (one, used) in enumerate(zip(cut.units, _used(cut, own), strict=True))
    ]


def _used(cut: CutModel, own: Sequence[set[str]]) -> list[set[str]]:
    """The trained parameters that each unit's calls use."""
    trained, found = set().union(*own), [set[str]() for _ in cut.units]
    for number, call in enumerate(cut.graphs[True].calls):
        found[bisect.bisect_right(cut.begins[True], number) - 1] |= call.parameters & trained
    return found


def _unit_of(cut: CutModel, layer: LayerFacts, module: str) -> int:
    """The unit of a layer.

    That of a module which is run whole is the first that runs it. That of code whose calls are in
    several units is the first that uses one of the layer's parameters, else the one in which the
    code makes most. What is in no call belongs to the last, as the loss.
    """
    calls = cut.graphs[True].calls
    made: Counter[int] = Counter()
    for number, call in enumerate(calls):
        unit = bisect.bisect_right(cut.begins[True], number) - 1
        if call.kind == "module" and f"{module}.".startswith(f"{call.target}."):
            return unit
        if call.kind != "module" and call.path[-1] == module:
            if call.parameters & layer.parameters.keys():
                return unit
            made[unit] += _bytes(cut.graphs[True], call)
    return made.most_common(1)[0][0] if made else len(cut.units) - 1


def _bytes(graph: ForwardGraph, call: ForwardCall) -> int:
    facts = [graph.facts[one] for one in call.result.refs()]
    return sum(one.bytes_of(_SAMPLES) for one in facts if one.shape is not None)
