"""Writes TensorBoard event files once a second.

Waking the writer's thread at every step would add milliseconds to the step.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

WRITTEN_EVERY_S = 1.0


class Events:
    """Scalars by step, counted from 1, under `folder`. Purges old data of steps after `done`."""

    def __init__(self, folder: Path, done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder), purge_step=done + 1, flush_secs=5)
        self._waiting: list[tuple[dict[str, float], int, float]] = []
        self._written_at = 0.0

    @property
    def due(self) -> bool:
        """Whether the next `add` writes the pending values."""
        return time.monotonic() - self._written_at > WRITTEN_EVERY_S

    def add(self, step: int, values: dict[str, float]) -> None:
        """Add the values of a step, by tag."""
        due = self.due
        self._waiting.append((values, step, time.time()))
        if due:
            self._write()

    def _write(self) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        waiting, self._waiting, self._written_at = self._waiting, [], time.monotonic()
        for values, step, at_s in waiting:
            parts = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
            self._writer.file_writer.add_summary(Summary(value=parts), step, at_s)

    def close(self) -> None:
        """Write the pending values and close the file."""
        self._write()
        self._writer.close()
