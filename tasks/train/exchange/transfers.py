"""Messages between pairs of ranks: tensors of any shape, with a header that says what they are.

`group_exchange` builds its operations from them. torch.distributed does not fit: Gloo delivers a
short message silently, and a receiver must know the size before (a batch of sequences has any
length).

A thread sends and receives, so a transfer goes on while the rank computes. Every message carries
its step, its name, and the type and shape of its tensors; a rank that expects another one raises an
error at once.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch  # noqa: TID253 - only ranks import this

from trainwright.tasks.errors import TrainingFailed
from trainwright.tasks.train.exchange.connections import connect
from trainwright.tasks.train.exchange.message_thread import MessageHeader, MessageThread

MessageOrder = Literal["blocking", "started", "gathers", "pairs"]
"""Messages are matched by their number among those of one order between two ranks.

So ranks may begin transfers of one order at different points between those of another.
"""
MessageKey = tuple[int, MessageOrder, int]
"""The other rank, the order, and the number of a message."""
Received = dict[int, list[torch.Tensor]]
"""Tensors by the rank that sent them."""


class UnlikeActions(TrainingFailed):
    """Two ranks do different things at once: the model's code does not run alike on all ranks."""

    kind = "unlike_actions"


@dataclass(eq=False)
class PendingTransfer:
    """A transfer under way: which messages of this name are to come, and which have not left."""

    name: str
    step: int
    keys: Sequence[MessageKey]
    then: Callable[[Received], None] | None = None
    missing: set[MessageKey] = field(default_factory=set)
    """of one with `then`: the messages that have not come"""
    followed: bool = False
    """whether `then` has returned or raised"""
    error: Exception | None = None
    """raised by `then`"""
    unsent: list[int] = field(default_factory=list)
    """the ranks to which a message has not left yet"""


class Transfers:
    """One rank's messages to and from all others."""

    def __init__(
        self, rank: int, size: int, store: Any, address: str, meet_s: float, most_wait_s: float
    ) -> None:
        """Connect to all others (`connections.connect`); `most_wait_s` is the timeout of a wait."""
        self.rank, self.size, self._most_wait_s = rank, size, most_wait_s
        self._sent, self._expected = (
            Counter[tuple[int, MessageOrder]](),
            Counter[tuple[int, MessageOrder]](),
        )
        """how many messages of each order there are to and from each rank"""
        self._arrived: dict[MessageKey, tuple[MessageHeader, bytearray]] = {}
        self._following: dict[MessageKey, PendingTransfer] = {}
        """the transfers whose `then` waits for a message"""
        self._lost: dict[int, str] = {}
        self._changed = threading.Condition()
        self.sent_bytes = 0
        """in messages that are not parts of sums"""
        connections = connect(rank, size, store, address, meet_s)
        self._thread = MessageThread(connections, self._arrive, self._lose)

    def begin(
        self,
        name: str,
        step: int,
        sends: Mapping[int, Sequence[torch.Tensor]],
        sources: Sequence[int],
        *,
        order: MessageOrder = "blocking",
        then: Callable[[Received], None] | None = None,
    ) -> PendingTransfer:
        """Send tensors to some ranks, and expect messages of this name from `sources`.

        Any two ranks begin the transfers between them in the same order, separately for each
        `order`; they may finish them in any order. The tensors must stay unchanged until `finish`.
        `then` is called with the messages in any thread, as soon as all of them are there.
        """
        transfer = self.expect(name, step, sources, order=order, then=then)
        self.send(transfer, sends, self.keys_to(list(sends), order))
        return transfer

    def expect(
        self,
        name: str,
        step: int,
        sources: Sequence[int],
        *,
        order: MessageOrder,
        then: Callable[[Received], None] | None = None,
    ) -> PendingTransfer:
        """As `begin`, but send nothing yet."""
        with self._changed:
            keys = [self._next(self._expected, source, order) for source in sources]
            transfer = PendingTransfer(name, step, keys, then)
            if then is not None:
                transfer.missing = {key for key in keys if key not in self._arrived}
                self._following.update(dict.fromkeys(transfer.missing, transfer))
        if then is not None and not transfer.missing:
            self._follow(transfer)
        return transfer

    def keys_to(self, others: Sequence[int], order: MessageOrder) -> list[MessageKey]:
        """Keys of messages, one to each of these ranks, which are sent now or later."""
        with self._changed:
            return [self._next(self._sent, other, order) for other in others]

    def _next(
        self, count: Counter[tuple[int, MessageOrder]], other: int, order: MessageOrder
    ) -> MessageKey:
        count[other, order] += 1
        return other, order, count[other, order]

    def send(
        self,
        transfer: PendingTransfer,
        sends: Mapping[int, Sequence[torch.Tensor]],
        keys: Sequence[MessageKey],
    ) -> None:
        """Send the messages of a transfer; `keys` are in the order of `sends`."""
        encoded: dict[int, tuple[MessageHeader, list[memoryview]]] = {}
        for key, (other, tensors) in zip(keys, sends.items(), strict=True):
            if id(tensors) not in encoded:
                encoded[id(tensors)] = _encoded(transfer.name, transfer.step, tensors)
            header, content = encoded[id(tensors)]
            with self._changed:
                transfer.unsent.append(other)
            text = json.dumps({**header, "order": key[1], "number": key[2]}).encode()
            size = self._thread.send(other, text, content, partial(self._left, transfer, other))
            if not transfer.name.startswith("sum"):
                self.sent_bytes += size

    def finish(self, transfer: PendingTransfer) -> Received:
        """Wait for a transfer's messages, and until its own have left.

        The tensors from each source, in host memory; none if it has a `then`. Raises OSError if a
        rank is lost or silent, UnlikeActions if another message comes, and what `then` raised.
        """
        found: Received = {}
        if transfer.then is None:
            for key in transfer.keys:
                self._wait(transfer, partial(self._not_arrived, key))
                found[key[0]] = self._opened(transfer, key)
        else:
            sources = [key[0] for key in transfer.keys]
            self._wait(transfer, lambda: [] if transfer.followed else sources)
        if transfer.error is not None:
            raise transfer.error
        self._wait(transfer, lambda: transfer.unsent)
        return found

    def _not_arrived(self, key: MessageKey) -> list[int]:
        return [] if key in self._arrived else [key[0]]

    def _wait(self, transfer: PendingTransfer, missing: Callable[[], Sequence[int]]) -> None:
        """Wait while any ranks are `missing`."""
        until = time.monotonic() + self._most_wait_s
        with self._changed:
            while others := missing():
                for one in others:
                    if one in self._lost:
                        if self._thread.out_of_memory:
                            raise MemoryError(f"{transfer.name}: from rank {one}")
                        raise OSError(f"rank {one}: {self._lost[one]}")
                if not self._changed.wait(until - time.monotonic()):
                    names = ", ".join(map(str, others))
                    raise TimeoutError(f"{transfer.name}: nothing came from rank {names}")

    def _opened(self, transfer: PendingTransfer, key: MessageKey) -> list[torch.Tensor]:
        """The tensors of a message that is there. Raises UnlikeActions."""
        header, content = self._arrived.pop(key)
        if (header["name"], header["step"]) != (transfer.name, transfer.step):
            raise UnlikeActions(
                f"rank {self.rank} expects {transfer.name} of step {transfer.step} from rank "
                f"{key[0]}, which sent {header['name']} of step {header['step']}: the model's "
                "code does not run alike on all ranks",
                final=True,
            )
        return _decoded(header, content)

    def close(self) -> None:
        """End the thread and close all connections."""
        self._thread.close()

    # -- in the thread ---------------------------------------------------------------------------

    def _arrive(self, other: int, header: MessageHeader, content: bytearray) -> None:
        key = other, header["order"], header["number"]
        with self._changed:
            self._arrived[key] = header, content
            transfer = self._following.pop(key, None)
            if transfer is not None:
                transfer.missing.discard(key)
            self._changed.notify_all()
        if transfer is not None and not transfer.missing:
            self._follow(transfer)

    def _follow(self, transfer: PendingTransfer) -> None:
        """All messages of a transfer are there: do what follows."""
        assert transfer.then is not None
        try:
            transfer.then({key[0]: self._opened(transfer, key) for key in transfer.keys})
        except Exception as error:  # noqa: BLE001 - `finish` raises it in the rank's own thread
            transfer.error = error
        with self._changed:
            transfer.followed = True
            self._changed.notify_all()

    def _left(self, transfer: PendingTransfer, other: int) -> None:
        with self._changed:
            transfer.unsent.remove(other)
            self._changed.notify_all()

    def _lose(self, other: int, why: str) -> None:
        with self._changed:
            self._lost[other] = why
            self._changed.notify_all()


def _encoded(
    name: str, step: int, tensors: Sequence[torch.Tensor]
) -> tuple[MessageHeader, list[memoryview]]:
    """A message's header, and its content in pieces: each tensor's memory."""
    hosted = [one.detach().cpu().contiguous() for one in tensors]
    header = {
        "name": name,
        "step": step,
        "tensors": [[str(one.dtype).removeprefix("torch."), list(one.shape)] for one in hosted],
        "bytes": sum(_padded(one.nbytes) for one in hosted),
    }
    content = []
    for one in hosted:
        if one.numel():
            # A single element is contiguous with any stride, but torch views only a stride of 1.
            flat = one.reshape(-1).as_strided((one.numel(),), (1,))
            content.append(flat.view(torch.uint8).numpy().data)
        if padding := _padded(one.nbytes) - one.nbytes:
            content.append(memoryview(bytes(padding)))
    return header, content


def _padded(size: int) -> int:
    """Every tensor begins at a multiple of eight bytes."""
    return -(-size // 8) * 8


def _decoded(header: MessageHeader, content: bytearray) -> list[torch.Tensor]:
    """A message's tensors, which share the memory of its content."""
    found, at = [], 0
    for dtype_name, shape in header["tensors"]:
        dtype = getattr(torch, dtype_name)
        count = torch.Size(shape).numel()
        if count:
            found.append(torch.frombuffer(content, dtype=dtype, count=count, offset=at).view(shape))
        else:
            found.append(torch.empty(shape, dtype=dtype))
        at += _padded(count * dtype.itemsize)
    return found
