"""The part of plan.json about a cluster's queue."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trainwright.tasks.runs.value import Value
from trainwright.tasks.units import seconds


class QueueWait(Value):
    """How long the plan's hosts are expected to wait in a cluster's queue."""

    engine: Literal["slurm", "kubernetes"] = Field(description="whose queue")
    expected_s: float | None = Field(
        default=None,
        description="until the last host, when the plan was made; None: unknown, not zero",
    )
    unknown: str = Field(default="", description="if the wait is unknown: why")

    @property
    def in_words(self) -> str:
        """`Slurm expects to grant its hosts in 10 min`."""
        name = self.engine.capitalize()
        if self.expected_s is None:
            return f"wait in {name}'s queue unknown: {self.unknown}"
        when = "at once" if self.expected_s < 1 else f"in {seconds(self.expected_s)}"
        return f"{name} expects to grant its hosts {when}"
