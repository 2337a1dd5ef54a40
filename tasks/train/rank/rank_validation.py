"""Validation of a rank: its share of the held-out rows, and metrics summed over ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch  # noqa: TID253 - only ranks import this

from trainwright.tasks.data.model_reader import ModelReader
from trainwright.tasks.train.batch.sampling import shares
from trainwright.tasks.train.rank.divergence import without_weight
from trainwright.tasks.train.rank.rank_passes import RankPasses
from trainwright.tasks.train.rank.validation_metrics import ValidationMetrics, naive_error, sums_of

LEAST_VALIDATION_BATCH = 64
NAIVE_ROWS = 1 << 16
"""The most rows from which the scale of MASE is made."""
_READ_ROWS = 1024


class RankValidation(RankPasses):
    """Computes metrics on the held-out rows, together with the other ranks."""

    _naive: float | None = None

    @torch.no_grad()
    def validate(self) -> ValidationMetrics:
        """Loss and the task's metrics on the held-out rows, split over the ranks.

        Raises BadInput if the loss is not finite because of a sample, or none has a weight in it.
        """
        parts = shares(len(self.validation_rows), self.split)
        begin = sum(parts[: self._sharer])
        rows = self.validation_rows[begin : begin + parts[self._sharer]]
        figures, schema = torch.zeros(4, dtype=torch.float64), self.request.schema_
        first = self.loader.rows(self.validation_rows[:1])[1].reshape(-1)[0]
        classes, naive = len(schema.classes or ()), self._naive_error()
        sums = sums_of(schema.task, classes, float(first), self.device, naive)
        size = max(LEAST_VALIDATION_BATCH, self.split[self._sharer])
        self._layout.join_statistics()
        self.model.eval()
        batches = 0
        for batch in self.loader.in_turn(rows, size):
            self._layout.begin_part(number := batches, last=False)
            batches += 1
            inputs, targets = self.given(batch)
            count = len(targets)
            if self._stage is None:
                outputs, loss, weight = self._forward(inputs, targets, count)
            elif (evaluated := self._stage.evaluate(batch, number)) is not None:
                outputs, loss, weight = evaluated
            else:
                continue
            total = float(loss) * weight if weight else 0.0
            figures += torch.tensor(
                [total, self.correct(outputs, targets), count, weight], dtype=torch.float64
            )
            if sums is not None:
                sums.add(outputs, targets)
        self._join_others(batches, parts)
        self.model.train()
        loss, correct, count, weight = self.collective.sum_(figures, "validation").tolist()
        if not math.isfinite(loss):
            self._require_finite_validation(rows, size)
        if not weight:
            raise without_weight(f"{count:.0f} validation samples")
        metrics = {"loss": loss / weight}
        if self.classifies:
            metrics["accuracy"] = correct / count
        if sums is None:
            return ValidationMetrics(metrics)
        sums.vector = self.collective.sum_(sums.vector.cpu(), "metrics")
        found = sums.found(count)
        return ValidationMetrics({**metrics, **found.metrics, **metrics}, found.by_class)

    def _require_finite_validation(self, rows: Any, size: int) -> None:
        """Raise BadInput for the first of this rank's rows with a value that is not finite."""
        if isinstance(self.dataset, ModelReader):
            for begin in range(0, len(rows), size):
                part = rows[begin : begin + size]
                self._require_finite(self.dataset, part, self.loader.rows(part))

    def _join_others(self, batches: int, parts: Sequence[int]) -> None:
        """Take part in the other ranks' batches of a validation, if layers are sharded.

        With one row, whose outputs don't count. `parts` are the rows of each device.
        """
        if not self._layout.divides_rows:
            return
        sizes = [max(LEAST_VALIDATION_BATCH, one) for one in self.split]
        most = max(-(-part // size) for part, size in zip(parts, sizes, strict=True))
        for number in range(batches, most):
            self._layout.begin_part(number, last=False)
            row = self.loader.rows(self.validation_rows[:1])
            if self._stage is None:
                self._forward(*self.given(row), 0)
            else:
                self._stage.evaluate(row, number)

    def _naive_error(self) -> float | None:
        """The scale of MASE: the error of the naive one-step forecast on the training rows.

        From at most `NAIVE_ROWS` evenly spaced rows. None unless it is a forecast from an input
        `history`, (rows, times).
        """
        schema = self.request.schema_
        if schema.task != "forecasting" or len(schema.inputs.get("history", ())) != 1:
            return None
        if self._naive is None:
            spaced = self.train_rows[:: -(-len(self.train_rows) // NAIVE_ROWS)]
            last, following = [], []
            for inputs, targets in self.loader.in_turn(spaced, _READ_ROWS):
                last.append(inputs["history"][:, -1].clone())
                following.append(targets.reshape(len(targets), -1)[:, 0].clone())
            self._naive = naive_error(torch.cat(last), torch.cat(following))
        return self._naive
