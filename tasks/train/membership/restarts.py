"""Whose process is started again, and when that ends. Pure.

A device's deaths count from zero again once it has taken part until a checkpoint. An error that the
code raises twice at one step would come a third time, on whichever device; a kill would not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from trainwright.tasks.errors import TrainingFailed

ERRORS_AT_A_STEP = 2
FRUITLESS = 3
"""So many groups in a row may end without a step and without a lost process, over the time for
which devices are waited for: the next one would end the same way."""
FRUITLESS_PAUSE_S = 1.0


class RestartLimits:
    """Deaths of each device's processes, and errors of the code by step, since a checkpoint."""

    def __init__(self, restarts: int) -> None:
        """`restarts`: how often a process is started again without reaching a checkpoint."""
        self._restarts = restarts
        self._deaths: Counter[int] = Counter()
        self._errors: Counter[int | None] = Counter()

    def died(self, number: int) -> None:
        """The process of a device has ended."""
        self._deaths[number] += 1

    def allows(self, number: int) -> bool:
        """Whether a process is started for the device again."""
        return self._deaths[number] <= self._restarts

    def reached_checkpoint(self, members: Collection[int]) -> None:
        """These have taken part until a checkpoint."""
        for number in members:
            self._deaths[number] = 0
        self._errors.clear()

    def repeats(self, step: int | None) -> bool:
        """Note an error of the code at a step; whether it is not the first there."""
        self._errors[step] += 1
        return self._errors[step] >= ERRORS_AT_A_STEP


class FruitlessGroups:
    """Groups in a row that ended without a step and without a lost process."""

    def __init__(self, patience_s: float) -> None:
        """`patience_s`: for how long groups may end so before the training fails."""
        self._patience_s = patience_s
        self._count = self._newest = 0
        self._since = self._ended_at = 0.0
        self.sum_error = ""
        """what a rank reported first of the sums that failed"""

    def allow_next(self, generation: int, now: float, *, fruitful: bool, kept: bool) -> bool:
        """Whether the group after this one may form now: after a fruitless one, not at once.

        `kept`: whether there is a checkpoint. Raises TrainingFailed if groups end again and again,
        and only their ranks know why.
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
                f"{self.sum_error}; hosts must reach this machine and each other by any TCP port, "
                f"and the ranks' logs say more{'; the last checkpoint is kept' if kept else ''}"
            )
        return now - self._ended_at >= FRUITLESS_PAUSE_S
