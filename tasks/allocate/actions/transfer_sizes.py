"""The bytes that each transfer of a step moves between ranks. Arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from trainwright.estimator.predict.communication import FIGURES_BYTES
from trainwright.estimator.structure import DenseProduct, LayerFacts, Unit
from trainwright.tasks.allocate.actions.action import MESSAGES, Action
from trainwright.tasks.allocate.actions.number_sizes import (
    INDEX_BYTES,
    activation_number_bytes,
    gradient_number_bytes,
)
from trainwright.tasks.runs.artefacts.layout import Layout

_BF16_BYTES = 2


class Moved(NamedTuple):
    """The bytes of a transfer: of a ring of sums, or from each rank to each other."""

    ring_bytes: float = 0.0
    pairs: Any = None
    """a numpy array, shape (ranks, ranks): bytes from the row's rank to the column's"""
    group: tuple[int, ...] = ()
    """the ranks; empty: all"""

    def sent_bytes(self, ranks: int) -> Any:
        """What each of so many ranks sends: a numpy array."""
        import numpy as np

        members = len(self.group) or ranks
        own = (
            np.full(members, 2 * (members - 1) / members * self.ring_bytes)
            if self.pairs is None
            else self.pairs.sum(axis=1)
        )
        if not self.group:
            return own
        found = np.zeros(ranks)
        found[list(self.group)] = own
        return found


class TransferSizes:
    """The sizes of a layout's transfers for a model."""

    def __init__(
        self, layout: Layout, layers: Sequence[LayerFacts], units: Sequence[Unit] = ()
    ) -> None:
        import numpy as np

        self._layout = layout
        self._layers: Mapping[str, LayerFacts] = {one.name: one for one in layers}
        self._units = {one.name: one for one in units}
        parts = max(len(pipeline.micro_batches) for pipeline in layout.pipelines)
        self._samples = np.zeros((parts, len(layout.devices)))
        """of each micro-batch and rank"""
        ranks = [pipeline for pipeline in layout.pipelines for _ in pipeline.stages]
        for rank, pipeline in enumerate(ranks):
            self._samples[: len(pipeline.micro_batches), rank] = pipeline.micro_batches
        # A rank without samples runs one that does not count, so that it takes part in transfers.
        self._run = np.maximum(1, self._samples)
        own = self._run if layout.rows else self._samples
        self._run_in_step = np.maximum(1, own.sum(axis=0))

    def of(self, action: Action) -> Moved:
        """The bytes of a transfer or of a message."""
        group = action.group
        if action.kind == "agree":
            return Moved(FIGURES_BYTES, group=group)
        if action.chunk is not None:
            size = gradient_number_bytes(self._layers[action.chunk.layers[0]])
            return Moved(size * action.chunk.elements, group=group)
        if action.kind in MESSAGES:
            return Moved(pairs=self._crossing(action), group=group)
        layer, members = self._layers[action.layer], list(group)
        dense = layer.dense
        assert dense is not None, action.name
        if action.kind == "gather" and action.started:
            pairs = self._factors(dense, members, gradient_number_bytes(layer))
            return Moved(pairs=pairs, group=group)
        rows = self._run[action.micro_batch][members] * dense.rows_per_sample
        held, size = self._held(action.layer)[members], activation_number_bytes(layer)
        of = _of_table if dense.kind == "embedding" else _of_rows
        return Moved(pairs=of(action, dense, rows, held, size), group=group)

    def _crossing(self, action: Action) -> Any:
        """From the first rank of the group to the second."""
        import numpy as np

        samples = float(self._samples[action.micro_batch, action.group[0]])
        crossing = self._units[action.layer].crossing_bytes(samples)
        return np.array([[0.0, crossing], [0.0, 0.0]])

    def _factors(self, dense: DenseProduct, members: list[int], size: int) -> Any:
        """`size`: bytes of a number, unless the layout says bf16."""
        rows = self._run_in_step[members] * dense.rows_per_sample
        size = _BF16_BYTES if self._layout.factor_type == "bf16" else size
        wide = (
            INDEX_BYTES + size * dense.outputs
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


def _of_rows(action: Action, dense: DenseProduct, rows: Any, held: Any, size: int) -> Any:
    """Bytes between ranks that each hold some rows of a product's weight."""
    import numpy as np

    if action.kind == "gather":
        return _to_all(size * rows * dense.inputs)
    if action.kind == "scatter-sum":
        pairs = np.tile(size * rows * dense.inputs, (len(rows), 1))
    elif action.name.startswith("output gradients"):
        pairs = size * np.outer(rows, held)
    else:
        pairs = size * np.outer(held, rows)
    np.fill_diagonal(pairs, 0.0)
    return pairs


def _of_table(action: Action, dense: DenseProduct, rows: Any, held: Any, size: int) -> Any:
    """Bytes between ranks that each hold some rows of a table, if all rows are equally frequent."""
    import numpy as np

    if action.kind == "gather":
        return _to_all(INDEX_BYTES * rows)
    share = held / max(1.0, held.sum())
    if action.kind == "scatter-sum":
        return np.zeros((len(rows), len(rows)))
    pairs = size * dense.outputs * np.outer(share, rows)
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
