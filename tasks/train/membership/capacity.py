"""Whether the remaining devices can train: enough devices with enough memory. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from trainwright.tasks.train.batch.sampling import split_among
from trainwright.tasks.train.membership.event import MemoryShortage


class TrainingCapacity:
    """The number of devices a training needs, and each device's largest batch that fits.

    A device has a limit after it ran out of memory.
    """

    def __init__(self, batch_sizes: Sequence[int], min_count: int) -> None:
        self._batch_sizes = list(batch_sizes)
        self._min_count = min(min_count, len(batch_sizes))
        self.limits: dict[int, int] = {}
        """by device; 0: not even one sample fits"""

    def limit(self, number: int, shortage: MemoryShortage, predicted: int | None) -> int:
        """Set and return the device's largest batch from now on.

        `predicted` is the largest batch that the plan's memory curve puts within the device's
        memory. The shortage proves the curve wrong, so the limit is at most half of the batch that
        failed, or a smaller batch that the device has finished a step with. If it has finished one
        with the batch that failed, other things take memory now, and it proves nothing.
        """
        half = shortage.batch_size // 2
        guess = half if predicted is None else min(predicted, half)
        fits = shortage.fits if shortage.fits < shortage.batch_size else 0
        self.limits[number] = max(guess, fits)
        return self.limits[number]

    def usable(self, numbers: Collection[int]) -> list[int]:
        """The devices that hold at least one sample, in order."""
        return sorted(number for number in numbers if self.limits.get(number) != 0)

    def lacks_memory(self, numbers: Collection[int]) -> bool:
        """Whether these devices would suffice if they had more memory."""
        return len(numbers) >= self._min_count and self.shortage(self.usable(numbers)) is not None

    def shortage(self, members: Collection[int]) -> str | None:
        """Why these devices can't train by themselves; None if they can."""
        total, count = sum(self._batch_sizes), len(self._batch_sizes)
        if not members:
            return f"none of {count} devices is left"
        if len(members) < self._min_count:
            return (
                f"{len(members)} of {count} devices left, "
                f"and devices.min_count is {self._min_count}"
            )
        if split_among(total, sorted(members), self._batch_sizes, self.limits) is None:
            held = ", ".join(
                f"device {number}: {limit}" for number, limit in sorted(self.limits.items())
            )
            # none of them is without a limit, or it would hold the rest
            fits = sum(self.limits[number] for number in members)
            smaller = f"--set train.global_batch_size={fits}" if fits else "use a smaller model"
            return (
                f"the global batch of {total} does not fit into the memory of "
                f"{len(members)} of {count} devices (at most {held}); {smaller}"
            )
        return None
