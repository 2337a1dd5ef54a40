"""How dense layers that several pipelines hold are kept equal: as the job says, or the best way.

The best one is searched by simulated steps, as in `choose`: all layers that permit it in one way,
then groups of alike layers, the largest first; a way that makes the step shorter is kept. None of
them changes the mathematics of training.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

from trainwright.estimator.structure import LayerFacts, Unit
from trainwright.tasks.allocate.actions.stage_parts import StagePart, stage_parts
from trainwright.tasks.allocate.layouts.memory import factors_bytes, rows_bytes
from trainwright.tasks.allocate.layouts.permitted import why_not
from trainwright.tasks.allocate.layouts.planning import LEAST_GAIN
from trainwright.tasks.allocate.layouts.stage_rules import why_not_between
from trainwright.tasks.allocate.plan.split import shares
from trainwright.tasks.runs.artefacts.layout import Layout, Sync

WAYS: tuple[Sync, ...] = ("factors", "rows")
_MOST_ACTIONS = 50_000
"""that are simulated in a search"""
_MOST_TRIES = 40


class StageSyncs:
    """The ways of the dense layers of a layout with several pipelines.

    `seconds` simulates the step of a layout. `speeds` are those of the devices, by id: they hold
    rows in proportion.
    """

    def __init__(
        self,
        layout: Layout,
        layers: Sequence[LayerFacts],
        units: Sequence[Unit],
        seconds: Callable[[Layout], float],
        speeds: Mapping[str, float],
    ) -> None:
        """`layout` has no layer that is not summed."""
        self._layout, self._layers, self._units = layout, layers, units
        self._seconds, self._speeds = seconds, speeds
        self._parts: Sequence[StagePart] = stage_parts(layout, layers, units)

    def why_not(self, layer: LayerFacts, way: Sync) -> str | None:
        """Why a layer can't be kept equal in this way; None if it can."""
        return why_not(layer, way) or why_not_between(
            layer, way, self._layout, self._layers, self._units, self._parts
        )

    def permitted(self, way: Sync) -> dict[str, Sync]:
        """This way, for each layer that permits it."""
        return {
            one.name: way
            for one in self._layers
            if one.parameters and self.why_not(one, way) is None
        }

    def why_none(self, way: Sync) -> str:
        """Why no layer permits a way: the reasons of the first ones."""
        trained = [one for one in self._layers if one.parameters]
        reasons = [f"{one.name}: {reason}" for one in trained if (reason := self.why_not(one, way))]
        return "; ".join(reasons[:3]) + ("; …" if len(reasons) > 3 else "")

    def with_ways(self, ways: Mapping[str, Sync]) -> Layout:
        """The layout in which these layers are not summed."""
        used: dict[str, Sync] = {name: way for name, way in ways.items() if way != "sum"}
        rows = {one.name: self._rows(one) for one in self._layers if used.get(one.name) == "rows"}
        return self._layout.model_copy(update={"sync": used, "rows": rows})

    def _rows(self, layer: LayerFacts) -> dict[str, tuple[int, int]]:
        dense = layer.dense
        assert dense is not None, layer.name
        total = dense.inputs if dense.kind == "embedding" else dense.outputs
        held = [
            device
            for device, part in zip(self._layout.devices, self._parts, strict=True)
            if layer.name in part.layer_names
        ]
        fastest = max(self._speeds[one] for one in held)
        counts = shares(total, [round(1e6 * self._speeds[one] / fastest) for one in held])
        ends = itertools.accumulate(counts, initial=0)
        return dict(zip(held, itertools.pairwise(ends), strict=True))

    def best(self) -> Layout:
        """The layout with the shortest step that was found; sums, unless another is much better."""
        found, summed_s = self._layout, self._seconds(self._layout)
        best_s, ways = summed_s, dict[str, Sync]()
        for tried in itertools.islice(self._candidates(ways), self._tries):
            layout = self.with_ways(tried)
            if (step_s := self._seconds(layout)) < best_s * (1 - 1e-9):
                found, best_s = layout, step_s
                ways.clear()
                ways.update(tried)
        return found if best_s < summed_s * (1 - LEAST_GAIN) else self._layout

    @property
    def _tries(self) -> int:
        """How many layouts are simulated: fewer of large ones."""
        parts = sum(len(part.micro_batches) * len(part.layers) for part in self._parts)
        return max(2, min(_MOST_TRIES, _MOST_ACTIONS // max(1, 3 * parts)))

    def _candidates(self, ways: Mapping[str, Sync]) -> Iterator[dict[str, Sync]]:
        """Ways to try: of all layers, then those of a group in place of theirs in `ways`."""
        allowed = {way: self.permitted(way) for way in WAYS}
        groups: dict[object, list[LayerFacts]] = {}
        for one in sorted(self._layers, key=lambda one: -one.parameter_bytes):
            if any(one.name in names for names in allowed.values()):
                groups.setdefault((one.dense, one.parameter_bytes), []).append(one)
        everywhere = (names for names in allowed.values() if names)
        of_groups = (
            {**ways, **{one.name: way for one in group}}
            for group in groups.values()
            for way in ("sum", *WAYS)
            if way == "sum" or all(one.name in allowed[way] for one in group)
            if any(ways.get(one.name, "sum") != way for one in group)
        )
        return itertools.chain(everywhere, of_groups)


def beside_sums(layer: LayerFacts, layout: Layout, device: str, tensors: int) -> float:
    """Bytes that a layer takes more on a device of its stage than if its gradients were summed.

    `tensors`: how many of a parameter's size a device holds.
    """
    how, samples = layout.how(layer.name), layout.samples
    whole = float(sum(samples[one.stages[0].device] for one in layout.pipelines))
    if how == "factors":
        return float(factors_bytes(layer, samples[device], whole, layout.factor_type))
    if how != "rows":
        return 0.0
    cuts = layout.rows[layer.name]
    begin, end = cuts.get(device, (0, 0))
    share = (end - begin) / max(last for _, last in cuts.values())
    return float(rows_bytes(layer, share, whole, tensors))
