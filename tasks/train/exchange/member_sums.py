"""Sums over some ranks, by messages: added in the order of ranks, so that all get the same digits.

A small tensor is sent whole to all members. Of a larger one each member gets a piece from all
others, sums it, and sends it to them: 2 (n - 1) / n of its bytes leave each member, as in a ring,
in two rounds. The thread that receives adds up, so a started sum goes on while ranks compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch  # noqa: TID253 - only ranks import this

from trainwright.tasks.train.exchange.transfers import (
    MessageOrder,
    Received,
    Transfers,
    UnlikeActions,
)

WHOLE_BYTES = 1 << 15
"""The most bytes of a tensor that is sent whole."""


def begin_whole(
    transfers: Transfers,
    step: int,
    tensor: torch.Tensor,
    what: str,
    members: Sequence[int],
    order: MessageOrder,
) -> Callable[[], None]:
    """Send the tensor to all members; a function that waits, and replaces it by the sum."""
    own, others = [tensor.detach().to("cpu", copy=True)], _others(transfers, members)
    begun = transfers.begin(what, step, dict.fromkeys(others, own), others, order=order)

    def end() -> None:
        found = alike(transfers.rank, what, members, transfers.finish(begun), own)
        tensor.copy_(added([one[0] for one in found]))

    return end


def begin_pieces(
    transfers: Transfers,
    step: int,
    tensor: torch.Tensor,
    what: str,
    members: Sequence[int],
    order: MessageOrder,
) -> Callable[[], None]:
    """Send each member its piece; a function that waits, and replaces the tensor by the sum."""
    rank, others = transfers.rank, _others(transfers, members)
    pieces = dict(
        zip(members, tensor.detach().reshape(-1).cpu().tensor_split(len(members)), strict=True)
    )
    # The keys are taken now: all members do so in the same order.
    sums = transfers.expect(f"summed {what}", step, others, order=order)
    keys = transfers.keys_to(others, order)
    own: list[torch.Tensor] = []

    def add_up(found: Received) -> None:
        parts = alike(rank, what, members, found, [pieces[rank]])
        own.append(_added_in_thread([one[0] for one in parts]))
        transfers.send(sums, dict.fromkeys(others, own), keys)

    sends = {one: [pieces[one]] for one in others}
    begun = transfers.begin(what, step, sends, others, order=order, then=add_up)

    def end() -> None:
        transfers.finish(begun)
        found = {**transfers.finish(sums), rank: own}
        for one, piece in pieces.items():
            _require(found[one], [piece], rank, one, what)
        tensor.copy_(torch.cat([found[one][0] for one in members]).view(tensor.shape))

    return end


def added(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum, in the order of the parts."""
    total = parts[0].clone()
    for one in parts[1:]:
        total += one
    return total


def _added_in_thread(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The same by numpy: torch would start threads for this thread."""
    import numpy as np

    total = parts[0].clone()
    for one in parts[1:]:
        np.add(total.numpy(), one.numpy(), out=total.numpy())
    return total


def alike(
    rank: int,
    what: str,
    members: Sequence[int],
    found: Received,
    own: Sequence[torch.Tensor],
    first: int = 0,
) -> list[list[torch.Tensor]]:
    """What came, in the members' order, on the devices of the rank's own tensors.

    Raises UnlikeActions if it is not shaped as these from dimension `first` on.
    """
    by_member = []
    for member in members:
        came = found.get(member, own)
        _require(came, own, rank, member, what, first)
        by_member.append([one.to(mine.device) for one, mine in zip(came, own, strict=True)])
    return by_member


def _require(
    came: Sequence[torch.Tensor],
    own: Sequence[torch.Tensor],
    rank: int,
    source: int,
    what: str,
    first: int = 0,
) -> None:
    theirs, mine = (
        [(one.dtype, one.dim(), one.shape[first:]) for one in some] for some in (came, own)
    )
    if theirs != mine:
        shapes = [
            ", ".join(f"{tuple(one.shape)} {one.dtype}".replace("torch.", "") for one in some)
            for some in (came, own)
        ]
        raise UnlikeActions(
            f"{what}: rank {source} sent {shapes[0]}, but rank {rank} has {shapes[1]}: the model's "
            "code does not run alike on all ranks",
            final=True,
        )


def _others(transfers: Transfers, members: Sequence[int]) -> list[int]:
    return [one for one in members if one != transfers.rank]
