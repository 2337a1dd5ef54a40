"""The gradient noise scale as a rank measures it beside its steps, and what checkpoints keep of it.

`joint_noise` estimates it from the steps of several ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np  # noqa: TID253 - only ranks import this
import torch  # noqa: TID253

from trainwright.tasks.train.batch.half_batches import due, half_squares
from trainwright.tasks.train.batch.noise_scale import NoiseScale, noise_and_signal
from trainwright.tasks.train.rank.joint_noise import JointNoise
from trainwright.tasks.train.rank.loss_scale import LossScale
from trainwright.tasks.train.rank.rank_validation import RankValidation


class RankNoise(RankValidation):
    """Measures the noise scale."""

    _noise: JointNoise

    @property
    def noise_scale(self) -> NoiseScale:
        return self._noise.scale

    def _measure_alone(self, parts: list[Any], step: int) -> float:
        """On a single-device plan, measure the noise scale from halves of the batch.

        Returns the cost in passes over the batch, 0 at steps without a measurement. If the batch
        is split into micro-batches, the first two of them serve as halves. The last remaining
        rank of a larger plan does not measure: a replay with all ranks could not repeat it.
        """
        if len(self.request.plan.devices) > 1 or not self.spec.adaptive_batch:
            return 0
        rows, first = np.concatenate(parts[:2]), len(parts[0]) if len(parts) > 1 else None
        if len(rows) < 4 or not due(step, self.noise_scale.estimates):
            return 0

        def loss_of(part: Any) -> tuple[torch.Tensor, float]:
            return self._forward(*self.given(self._part(part)), len(part))[1:]

        batches, squares, joint_square = half_squares(self.model, loss_of, rows, first)
        if all(batches):
            self.noise_scale.add(*noise_and_signal(batches, squares, joint_square))
        return len(rows) / sum(map(len, parts))

    @property
    def _counted_as(self) -> int:
        """The rank by which its samples are counted: the first stage of its pipeline.

        Of the group in which it last trained: a new one may have formed since.
        """
        return self.collective.rank if self._stage is None else self._first_stage(self._leader)

    def _first_stage(self, device: int) -> int:
        return self._layout.members.index(device)

    def _squares(self) -> list[float]:
        """|h_r|² of each rank's samples, as far as this rank has made that gradient."""
        found = [0.0] * self.collective.size
        found[self._counted_as] = self._gradients.own_square + self._layout.own_square
        for rank, square in enumerate(self._layout.squares if self._layout.sharded else []):
            leader = self._layout.sharers[rank]
            found[rank if self._stage is None else self._first_stage(leader)] += square
        return found

    def _weights(self, weight: float) -> list[float]:
        """By rank: this rank's weight, or what its pipeline's last stage knows of it."""
        found = [0.0] * self.collective.size
        found[self._counted_as] = weight
        return found

    def join_squares(self, *, holds: bool = True) -> None:
        """Add |g|² of the rows on all ranks to that of the last step, for `noise_document`.

        All ranks of a group call it at once. A rank that does not hold current rows adds none.
        """
        if self._layout.cut_tensors:
            self._noise.join_rows(self.collective, holds=holds)

    def noise_document(self) -> dict[str, Any]:
        """JSON for a checkpoint: the state of noise scale, and loss scale and averages if used."""
        scale = {"loss_scale": self.loss_scale.document()} if self._scales else {}
        averages = {"averaging": self.averaging.document()} if self.averaging is not None else {}
        return self._noise.document() | scale | averages

    def load_noise(self, document: dict[str, Any]) -> None:
        """Restore a `noise_document`."""
        self._noise = JointNoise.of(document)
        self.loss_scale = LossScale(**document.get("loss_scale", {}))
        if self.averaging is not None and "averaging" in document:
            self.averaging.load(document["averaging"])
