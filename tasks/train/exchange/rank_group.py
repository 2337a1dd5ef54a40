"""Some ranks of an exchange, for code that works with all ranks of an exchange or a collective."""

from __future__ import annotations

from collections.abc import Sequence

import torch  # noqa: TID253 - only ranks import this

from trainwright.tasks.train.exchange.group_exchange import Exchange, Started
from trainwright.tasks.train.exchange.transfers import MessageOrder


class RankGroup:
    """The operations of a group of ranks: ascending, this one among them.

    `rank` and `size` count within the group; `members` are the ranks' numbers in the exchange.
    """

    def __init__(self, exchange: Exchange, members: Sequence[int]) -> None:
        self._exchange, self.members = exchange, tuple(members)
        self.rank, self.size = self.members.index(exchange.rank), len(self.members)

    def sum_(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Sum a contiguous tensor over the group, in place."""
        return self._exchange.sum_(tensor, name, self.members)

    def start_sum(self, tensor: torch.Tensor, name: str) -> Started[None]:
        """Begin a sum without waiting."""
        return self._exchange.start_sum(tensor, name, self.members)

    def finish(self, started: Started[None]) -> None:
        """Wait for a sum that was begun."""
        self._exchange.finish(started)

    def gather(self, tensors: Sequence[torch.Tensor], name: str) -> list[list[torch.Tensor]]:
        """The tensors of each member, which may differ in their first dimension."""
        return self._exchange.gather(tensors, name, self.members)

    def start_gather(
        self, tensors: Sequence[torch.Tensor], name: str, *, order: MessageOrder = "started"
    ) -> Started[list[list[torch.Tensor]]]:
        """Begin a gather without waiting."""
        return self._exchange.start_gather(tensors, name, self.members, order=order)

    def exchange(self, parts: Sequence[torch.Tensor], name: str) -> list[torch.Tensor]:
        """Send one part to each member; the parts that they send."""
        return self._exchange.exchange(parts, name, self.members)

    def scatter_sum(self, parts: Sequence[torch.Tensor], name: str) -> torch.Tensor:
        """Send one part to each member; the sum of those for this rank."""
        return self._exchange.scatter_sum(parts, name, self.members)
