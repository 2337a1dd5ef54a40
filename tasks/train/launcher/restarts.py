"""Who may take part in a training, whose process is started again, and when that is given up. Pure.

A device counts its deaths anew whenever it has seen a checkpoint through. An error that the code raises twice at one step would
come a third time too, on whichever device; a kill would not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from trainwright.tasks.train.batch.sampling import split_among

ERRORS_AT_A_STEP = 2


class Fleet:
    """The devices of a plan while they train, by number."""

    def __init__(self, batch_sizes: Sequence[int], *, min_count: int, restarts: int) -> None:
        self.batch_sizes = list(batch_sizes)
        self.min_count, self.restarts = min(min_count, len(batch_sizes)), restarts
        self.limits: dict[int, int] = {}
        """the largest batch of each device that ran out of memory"""
        self._deaths: Counter[int] = Counter()
        self._errors: Counter[int | None] = Counter()

    def died(self, number: int) -> None:
        """The process of a device has ended."""
        self._deaths[number] += 1

    def may_restart(self, number: int) -> bool:
        """Whether a process is started for it again."""
        return self._deaths[number] <= self.restarts

    def reached_checkpoint(self, members: Collection[int]) -> None:
        """These have taken part until a checkpoint."""
        for number in members:
            self._deaths[number] = 0
        self._errors.clear()

    def repeats(self, step: int | None) -> bool:
        """Take note of an error of the code at a step; whether it is not the first there."""
        self._errors[step] += 1
        return self._errors[step] >= ERRORS_AT_A_STEP

    def no_memory_for(
        self, number: int, batch_size: int, fits: int, predicted: int | None = None
    ) -> int:
        """A device ran out of memory with this batch: the largest that it is given from now on, which may be none (0).

        `fits` is the largest batch that it has been seen to hold, `predicted` what the plan's memory curve puts within the
        memory that it has. The curve stands corrected by what happened, so it is not believed for more than half.
        """
        guess = batch_size // 2 if predicted is None else min(predicted, batch_size // 2)
        self.limits[number] = min(batch_size - 1, max(guess, fits))
        return self.limits[number]

    def lacks_memory(self, present: Collection[int]) -> bool:
        """Whether these could train by themselves, had they the memory."""
        able = [number for number in present if self.limits.get(number) != 0]
        return len(present) >= self.min_count and self.why_not(able) is not None

    def why_not(self, members: Collection[int]) -> str | None:
        """Why these can't train by themselves; None where they can."""
        total, count = sum(self.batch_sizes), len(self.batch_sizes)
        if not members:
            return f"none of {count} devices is left"
        if len(members) < self.min_count:
            return (
                f"{len(members)} of {count} devices left, and devices.min_count is {self.min_count}"
            )
        if split_among(total, sorted(members), self.batch_sizes, self.limits) is None:
            held = ", ".join(
                f"device {number}: {limit}" for number, limit in sorted(self.limits.items())
            )
            return (
                f"the global batch of {total} does not fit into the memory of {len(members)} of {count} devices "
                f"(at most {held}); a smaller train.global_batch_size would"
            )
        return None
