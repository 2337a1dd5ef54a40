"""The gradient noise scale of steps that several ranks compute.

Its estimate from a step is complete in the next one, when the ranks have summed |g|².
"""

from __future__ import annotations

from typing import Any

import torch  # noqa: TID253 - only ranks import this

from trainwright.tasks.train.batch.noise_scale import NoiseScale
from trainwright.tasks.train.exchange.group_exchange import Exchange


class JointNoise:
    """The noise scale, and |g|² of the last step: of whole layers, and of this rank's rows."""

    def __init__(self) -> None:
        self.scale = NoiseScale()
        self._joint_square, self._rows_square = 0.0, 0.0

    @classmethod
    def of(cls, document: dict[str, Any]) -> JointNoise:
        """As `document` says."""
        found = cls()
        found._joint_square = document["joint_square"]
        found.scale = NoiseScale(**{name: document[name] for name in found.scale.document()})
        return found

    def document(self) -> dict[str, Any]:
        """JSON for a checkpoint; rows are left out, see `join_rows`."""
        return self.scale.document() | {"joint_square": self._joint_square}

    def own_part(self, *, first: bool) -> float:
        """What this rank adds to |g|² of the last step; `first`: for whole layers too."""
        return (self._joint_square if first else 0.0) + self._rows_square

    def begin(
        self, spread: float, total: int, ranks: int, joint_square: float, rows_square: float
    ) -> None:
        """Begin an estimate from a step of `ranks` ranks: 0 if its gradients overflowed."""
        self.scale.begin(spread, total, ranks)
        self._joint_square = joint_square if ranks > 1 else 0.0
        self._rows_square = rows_square if ranks > 1 else 0.0

    def join_rows(self, exchange: Exchange, *, holds: bool) -> None:
        """Add |g|² of the rows on all ranks. All call it at once; `holds`: see `join_squares`."""
        own = torch.tensor([self._rows_square if holds else 0.0], dtype=torch.float64)
        self._joint_square += float(exchange.sum_(own, "squares of rows"))
        self._rows_square = 0.0
