"""What ranks do together: sum, gather, scatter-sum, exchange, send, receive, among all or some.

A group is a sequence of ranks in ascending order, None for all; results come in its order, in the
memory of the rank's own tensors. Each operation has a started form, which `finish` ends: it goes on
while the rank computes. Any two ranks begin the operations that they share in the same order,
separately for blocking and for started ones, and for messages of pairs; they may finish them in any
order. Tensors that are sent must stay unchanged until then.

Every message says what it is. If ranks do different things, the one that finds it raises
UnlikeActions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch  # noqa: TID253 - only ranks import this

from trainwright.tasks.train.exchange.collective import PeersLost
from trainwright.tasks.train.exchange.member_sums import (
    WHOLE_BYTES,
    added,
    alike,
    begin_pieces,
    begin_whole,
)
from trainwright.tasks.train.exchange.transfers import MessageOrder, Received, Transfers

T = TypeVar("T")
Members = Sequence[int] | None


class Started(Generic[T]):
    """An operation under way; `Exchange.finish` waits for it."""

    def __init__(self, end: Callable[[], T]) -> None:
        self.end = end


class Exchange(ABC):
    """The operations of one rank. `wait_s` is the total time spent waiting in them."""

    rank: int
    size: int
    wait_s: float
    step: int
    """the step of the messages that are sent now"""

    @property
    def members(self) -> Sequence[int]:
        """The numbers of all ranks."""
        return range(self.size)

    @property
    @abstractmethod
    def transfers(self) -> Transfers | None:
        """The messages to all others; None if this rank is alone, or only sums over all."""

    @property
    def sums_on_devices(self) -> bool:
        """Whether sums of tensors on GPUs stay there; the same on all ranks."""
        return False

    @abstractmethod
    def _sum_of_all(
        self, tensor: torch.Tensor, name: str, order: MessageOrder
    ) -> Callable[[], object]:
        """Begin a sum over all ranks by a library; what waits for it."""

    @abstractmethod
    def _wait(self, act: Callable[[], T]) -> T:
        """Do what waits for other ranks."""

    @abstractmethod
    def shutdown(self) -> None:
        """Disconnect from the others; no operations are possible afterwards."""

    def finish(self, started: Started[T]) -> T:
        """The result of a started operation. Raises PeersLost, and UnlikeActions."""
        try:
            return self._wait(started.end)
        except OSError as error:
            raise PeersLost(f"transfers: {error}") from error

    # -- sums --------------------------------------------------------------------------------------

    def sum_(self, tensor: torch.Tensor, name: str, group: Members = None) -> torch.Tensor:
        """Sum a contiguous tensor over a group, in place.

        All members get the same last digit. Raises PeersLost and UnlikeActions.
        """
        self.finish(self.start_sum(tensor, name, group, order="blocking"))
        return tensor

    def start_sum(
        self,
        tensor: torch.Tensor,
        name: str,
        group: Members = None,
        *,
        order: MessageOrder = "started",
    ) -> Started[None]:
        """Begin a sum without waiting; the tensor is the sum after `finish`."""
        members, transfers = self._members(group), self.transfers
        if len(members) == 1:
            return Started(lambda: None)
        shape = f"{tuple(tensor.shape)} {tensor.dtype}".replace("torch.", "")
        what = self._named(f"sum of {shape}", name, members)
        end: Callable[[], object]
        if len(members) == self.size and transfers is None:
            end = self._sum_of_all(tensor, name, order)
        elif tensor.nbytes <= WHOLE_BYTES and not (tensor.is_cuda and self.sums_on_devices):
            end = begin_whole(self._connected(), self.step, tensor, what, members, order)
        elif len(members) < self.size:  # of tensors on GPUs too, by host memory
            end = begin_pieces(self._connected(), self.step, tensor, what, members, order)
        else:  # the library does not know whether all sum the same
            announced = self._begin(what, members, [[]] * self.size, order)
            summed = self._sum_of_all(tensor, name, order)

            def end() -> None:
                announced()
                summed()

        def ended() -> None:
            end()

        return Started(ended)

    # -- other operations --------------------------------------------------------------------------

    def gather(
        self, tensors: Sequence[torch.Tensor], name: str, group: Members = None
    ) -> list[list[torch.Tensor]]:
        """The tensors of each member, which may differ in their first dimension."""
        return self.finish(self.start_gather(tensors, name, group, order="blocking"))

    def start_gather(
        self,
        tensors: Sequence[torch.Tensor],
        name: str,
        group: Members = None,
        *,
        order: MessageOrder = "started",
    ) -> Started[list[list[torch.Tensor]]]:
        """Begin a gather without waiting."""
        members = self._members(group)
        what = self._named("gather", name, members)
        found = self._begin(what, members, [tensors] * len(members), order)
        return Started(lambda: alike(self.rank, what, members, found(), tensors, first=1))

    def exchange(
        self, parts: Sequence[torch.Tensor], name: str, group: Members = None
    ) -> list[torch.Tensor]:
        """Send one part to each member; the parts that they send. All may differ in shape."""
        return self.finish(self.start_exchange(parts, name, group, order="blocking"))

    def start_exchange(
        self,
        parts: Sequence[torch.Tensor],
        name: str,
        group: Members = None,
        *,
        order: MessageOrder = "started",
    ) -> Started[list[torch.Tensor]]:
        """Begin an exchange without waiting."""
        members = self._members(group)
        what, own = self._named("exchange", name, members), parts[members.index(self.rank)]
        found = self._begin(what, members, [[one] for one in parts], order)

        def end() -> list[torch.Tensor]:
            came = alike(self.rank, what, members, found(), [own], first=own.dim())
            return [one[0] for one in came]

        return Started(end)

    def scatter_sum(
        self, parts: Sequence[torch.Tensor], name: str, group: Members = None
    ) -> torch.Tensor:
        """Send one part to each member; the sum of those for this rank, in the members' order.

        Parts for different members may differ in shape.
        """
        return self.finish(self.start_scatter_sum(parts, name, group, order="blocking"))

    def start_scatter_sum(
        self,
        parts: Sequence[torch.Tensor],
        name: str,
        group: Members = None,
        *,
        order: MessageOrder = "started",
    ) -> Started[torch.Tensor]:
        """Begin a scatter-sum without waiting."""
        members = self._members(group)
        what, own = self._named("scatter-sum", name, members), parts[members.index(self.rank)]
        found = self._begin(what, members, [[one] for one in parts], order)

        def end() -> torch.Tensor:
            return added([one[0] for one in alike(self.rank, what, members, found(), [own])])

        return Started(end)

    def send(self, tensors: Sequence[torch.Tensor], to: int, name: str) -> None:
        """Send tensors to a rank, and wait until they have left."""
        self.finish(self.start_send(tensors, to, name))

    def start_send(self, tensors: Sequence[torch.Tensor], to: int, name: str) -> Started[None]:
        """Begin to send tensors to a rank."""
        transfers, what = self._connected(), f"message {name}"
        sent = transfers.begin(what, self.step, {to: tensors}, [], order="pairs")

        def end() -> None:
            transfers.finish(sent)

        return Started(end)

    def receive(self, source: int, name: str) -> list[torch.Tensor]:
        """The tensors that a rank sends to this one, in host memory."""
        return self.finish(self.start_receive(source, name))

    def start_receive(self, source: int, name: str) -> Started[list[torch.Tensor]]:
        """Begin to receive what a rank sends."""
        transfers, what = self._connected(), f"message {name}"
        came = transfers.begin(what, self.step, {}, [source], order="pairs")
        return Started(lambda: transfers.finish(came)[source])

    # -- parts of them -----------------------------------------------------------------------------

    def _members(self, group: Members) -> Sequence[int]:
        if group is None:
            return range(self.size)
        if self.rank not in group or sorted({*group} & {*range(self.size)}) != list(group):
            raise ValueError(
                f"group: got {list(group)} on rank {self.rank} of {self.size}; allowed: ranks in "
                "ascending order, this one among them"
            )
        return group

    def _named(self, kind: str, name: str, members: Sequence[int]) -> str:
        some = f" among {', '.join(map(str, members))}" if len(members) < self.size else ""
        return f"{kind} {name}{some}"

    def _connected(self) -> Transfers:
        if self.transfers is None:
            raise ValueError("this worker group has no connections but for sums over all ranks")
        return self.transfers

    def _begin(
        self,
        what: str,
        members: Sequence[int],
        parts: Sequence[Sequence[torch.Tensor]],
        order: MessageOrder,
    ) -> Callable[[], Received]:
        """Send each other member its part; a function that waits for theirs."""
        if len(members) == 1:
            return dict
        transfers = self._connected()
        others = [one for one in members if one != self.rank]
        sends = dict(zip(members, parts, strict=True))
        del sends[self.rank]
        begun = transfers.begin(what, self.step, sends, others, order=order)
        return lambda: transfers.finish(begun)
