"""The bytes that each transfer of a step moves between ranks. Arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from trainwright.estimator.predict.communication import FIGURES_BYTES
from trainwright.estimator.structure import DenseProduct, LayerFacts
from trainwright.tasks.allocate.layouts.actions import FLOAT_BYTES, Action
from trainwright.tasks.runs.artefacts.layout import Layout

_INDEX_BYTES = 8
_WIRE_BYTES = {"fp32": 4, "bf16": 2}


class Moved(NamedTuple):
    """The bytes of a transfer: of a ring of sums, or from each rank to each other."""

    ring_bytes: float = 0.0
    pairs: Any = None
    """a numpy array, shape (ranks, ranks): bytes from the row's rank to the column's"""

    def sent_bytes(self, ranks: int) -> Any:
        """What each rank sends: a numpy array."""
        import numpy as np

        if self.pairs is not None:
            return self.pairs.sum(axis=1)
        return np.full(ranks, 2 * (ranks - 1) / ranks * self.ring_bytes)


class TransferSizes:
    """The sizes of a layout's transfers for a model."""

    def __init__(self, layout: Layout, layers: Sequence[LayerFacts]) -> None:
        import numpy as np

        self._layout = layout
        self._layers: Mapping[str, LayerFacts] = {one.name: one for one in layers}
        parts = max(len(pipeline.micro_batches) for pipeline in layout.pipelines)
        self._samples = np.zeros((parts, len(layout.pipelines)))
        for rank, pipeline in enumerate(layout.pipelines):
            self._samples[: len(pipeline.micro_batches), rank] = pipeline.micro_batches

    def of(self, action: Action) -> Moved:
        """The bytes of a transfer."""
        if action.kind == "agree":
            return Moved(FIGURES_BYTES)
        if action.chunk is not None:
            return Moved(FLOAT_BYTES * action.chunk.elements)
        dense = self._layers[action.layer].dense
        assert dense is not None, action.name
        if action.kind == "gather" and action.started:
            return Moved(pairs=self._factors(dense))
        samples = self._samples[action.micro_batch] * dense.rows_per_sample
        held = self._held(action.layer)
        if dense.kind == "embedding":
            return Moved(pairs=_of_table(action, dense, samples, held))
        return Moved(pairs=_of_rows(action, dense, samples, held))

    def _factors(self, dense: DenseProduct) -> Any:
        rows = self._samples.sum(axis=0) * dense.rows_per_sample
        size = _WIRE_BYTES[self._layout.factor_type]
        wide = (
            _INDEX_BYTES + size * dense.outputs
            if dense.kind == "embedding"
            else size * (dense.inputs + dense.outputs)
        )
        return _to_all(rows * wide)

    def _held(self, layer: str) -> Any:
        """The number of rows of the weight that each rank holds."""
        import numpy as np

        held = self._layout.rows[layer]
        cuts = [held.get(device, (0, 0)) for device in self._layout.devices]
        return np.array([end - begin for begin, end in cuts], dtype=float)


def _of_rows(action: Action, dense: DenseProduct, samples: Any, held: Any) -> Any:
    """Bytes between ranks that each hold some rows of a product's weight."""
    import numpy as np

    if action.kind == "gather":
        return _to_all(FLOAT_BYTES * samples * dense.inputs)
    if action.kind == "scatter-sum":
        pairs = np.tile(FLOAT_BYTES * samples * dense.inputs, (len(samples), 1))
    elif action.name.startswith("output gradients"):
        pairs = FLOAT_BYTES * np.outer(samples, held)
    else:
        pairs = FLOAT_BYTES * np.outer(held, samples)
    np.fill_diagonal(pairs, 0.0)
    return pairs


def _of_table(action: Action, dense: DenseProduct, samples: Any, held: Any) -> Any:
    """Bytes between ranks that each hold some rows of a table, if all rows are equally frequent."""
    import numpy as np

    if action.kind == "gather":
        return _to_all(_INDEX_BYTES * samples)
    share = held / max(1.0, held.sum())
    if action.kind == "scatter-sum":
        return np.zeros((len(samples), len(samples)))
    pairs = FLOAT_BYTES * dense.outputs * np.outer(share, samples)
    if action.name.startswith("output gradients"):
        pairs = pairs.T.copy()
    np.fill_diagonal(pairs, 0.0)
    return pairs


def _to_all(own: Any) -> Any:
    """Every rank sends its bytes to each other."""
    import numpy as np

    pairs = np.tile(np.asarray(own, dtype=float)[:, None], (1, len(own)))
    np.fill_diagonal(pairs, 0.0)
    return pairs
