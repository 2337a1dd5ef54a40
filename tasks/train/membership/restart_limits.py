"""Limits restarts of rank processes. Pure.

A device's count of deaths returns to zero when it has taken part until a checkpoint. If the code
raises an error twice at the same step, it would raise it a third time on any device; a kill is
different.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from trainwright.tasks.errors import TrainingFailed

ERRORS_AT_A_STEP = 2
FRUITLESS = 3
"""Number of groups in a row that may end without a step and without a lost process, spread over the
patience for devices. The next group would end the same way."""
FRUITLESS_PAUSE_S = 1.0


class RestartLimits:
    """Counts each device's deaths, and the code's errors by step, since the last checkpoint."""

    def __init__(self, restarts: int) -> None:
        """`restarts`: how often a process may restart without reaching a checkpoint."""
        self._restarts = restarts
        self._deaths: Counter[int] = Counter()
        self._errors: Counter[int | None] = Counter()

    def died(self, number: int) -> None:
        """Count the end of the device's process."""
        self._deaths[number] += 1

    def allows(self, number: int) -> bool:
        """Whether the device's process may restart."""
        return self._deaths[number] <= self._restarts

    def reached_checkpoint(self, members: Collection[int]) -> None:
        """Reset the counts of these devices, which took part until a checkpoint."""
        for number in members:
            self._deaths[number] = 0
        self._errors.clear()

    def repeats(self, step: int | None) -> bool:
        """Record an error of the code at a step. Returns whether it is a repeated one."""
        self._errors[step] += 1
        return self._errors[step] >= ERRORS_AT_A_STEP


class FruitlessGroups:
    """Groups in a row that ended without a step and without a lost process."""

    def __init__(self, patience_s: float) -> None:
        """`patience_s`: how long groups may keep ending like this before the training fails."""
        self._patience_s = patience_s
        self._count = self._newest = 0
        self._since = self._ended_at = 0.0
        self.sum_error = ""
        """the first reported reason why a sum failed"""

    def allow_next(self, generation: int, now: float, *, fruitful: bool, kept: bool) -> bool:
        """Whether the group after this one may form now; after a fruitless one, only later.

        `kept`: whether a checkpoint exists. Raises TrainingFailed if too many groups in a row were
        fruitless.
        """
        if fruitful:
            self._count, self.sum_error = 0, ""
            return True
        if self._newest < generation:
            self._newest, self._ended_at = generation, now
            self._since = self._since if self._count else now
            self._count += 1
        if self._count >= FRUITLESS and now - self._since >= self._patience_s:
            raise TrainingFailed(
                f"the ranks' sums failed {self._count} times in a row, and no rank was lost: "
                f"{self.sum_error}; hosts must reach this machine and each other on any TCP port, "
                f"and the ranks' logs have details{'; the last checkpoint is kept' if kept else ''}"
            )
        return now - self._ended_at >= FRUITLESS_PAUSE_S
