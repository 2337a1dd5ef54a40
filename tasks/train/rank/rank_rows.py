"""A rank's rows of a step: which it takes, and its micro-batches."""

from __future__ import annotations

from typing import Any

import numpy as np  # noqa: TID253 - only ranks import this

from trainwright.tasks.data.model_reader import ModelReader
from trainwright.tasks.train.batch.sampling import own_places, shares
from trainwright.tasks.train.pipeline.stage_passes import StagePasses
from trainwright.tasks.train.rank.batch_loader import BatchTensors
from trainwright.tasks.train.rank.replica import Replica


class RankRows(Replica):
    """Reads the rank's share of a batch. All stages of a pipeline have that of the first."""

    split: list[int]
    """of the batch, by device"""
    _loaded: BatchTensors | None
    """the current step's rows; None if it has none"""
    _batch_size = 0
    _places = (0, 0)
    """the first and the last place of this rank's samples in the epoch's order"""
    _stage: StagePasses | None = None
    """of a layout with stages, from `cut` on"""
    _leader: int
    """the device of its pipeline's first stage"""

    @property
    def _sharer(self) -> int:
        """The number of the device whose share of the batch this rank computes."""
        return self.number if self._stage is None else self._leader

    def _load(self, order: Any, begin: int, total: int) -> list[Any]:
        """Load the step's rows; its micro-batches."""
        if self._stage is None or self._stage.reads_rows:
            following = self._following(len(order), begin + total)
            self._loaded = self.loader.batch(order, self._places, following)
        return self._micro_batches(self._batch_size, total)

    def _require_finite_rows(self, order: Any) -> None:
        """Raise BadInput for the first of the step's rows with a value that is NaN or infinite.

        To be called if the loss is not finite. Only what a model's source reads may have such
        values: other data is validated whole.
        """
        reads = self._stage is None or self._stage.reads_rows
        if isinstance(self.dataset, ModelReader) and reads and self._loaded is not None:
            self._require_finite(self.dataset, order[slice(*self._places)], self._loaded)

    def _require_finite(self, reader: ModelReader, rows: Any, batch: BatchTensors) -> None:
        inputs, targets = batch
        arrays = {name: one.numpy() for name, one in inputs.items()}
        reader.require_finite(rows, arrays, targets.numpy())

    def _following(self, rows: int, begin: int) -> list[tuple[int, int]]:
        """The places of this rank's rows in the next steps of the epoch, if the split stays.

        As many as the loader reads ahead.
        """
        steps: list[tuple[int, int]] = []
        while begin < rows and len(steps) < self.loader.ahead:
            own, total = own_places(rows, begin, self.split, self._sharer)
            steps.append(own)
            begin += total
        return steps

    def _part(self, places: Any) -> BatchTensors:
        """A micro-batch of the step's rows, by the first and last of its places among them."""
        assert self._loaded is not None
        inputs, targets = self._loaded
        if len(places) == len(targets):
            return self._loaded
        part = slice(int(places[0]), int(places[-1]) + 1)
        return {name: tensor[part] for name, tensor in inputs.items()}, targets[part]

    def _micro_batches(self, size: int, total: int) -> list[Any]:
        """Split the rank's rows evenly into as many micro-batches as the plan and the rows allow.

        Each is an array of places among the step's rows.

        With joint batch normalisation or sharded layers, all ranks have the same number of parts,
        some perhaps empty.
        Without it, empty parts are dropped, but one part of a stage always remains.
        """
        rows = np.arange(size)
        if self._stage is not None:
            parts = self._stage.micro_batches(rows)
            if self._stage.divides_rows:
                return parts
            return [part for part in parts if len(part)] or parts[:1]
        if self.alone and self.layout.local_batch is not None:
            return np.array_split(rows, max(1, round(size / self.layout.local_batch)))
        parts = np.array_split(
            rows, min(self.request.plan.accumulation, max(shares(total, self.split)))
        )
        if self._joined or self._layout.is_cut:
            return parts
        return [part for part in parts if len(part)]
