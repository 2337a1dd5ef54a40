"""Puts together tensors of which every rank holds some rows: for checkpoints and new groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch  # noqa: TID253 - only ranks import this

from trainwright.tasks.train.exchange.collective import take_document

if TYPE_CHECKING:
    from trainwright.tasks.train.rank.replica import Replica

Shapes = Mapping[str, Mapping[str, tuple[list[int], str]]]
"""By file and name: shape and type of a whole tensor."""


def row_shapes(rank: Replica) -> Shapes:
    """The whole tensors whose rows are on several ranks."""
    return {
        file: {
            name: (
                [sharded.total, *own.shape[1:]],
                str(own.dtype).removeprefix("torch."),
            )
            for name, (own, sharded) in tensors.items()
        }
        for file, tensors in rank.sharded_tensors().items()
    }


def whole_rows(rank: Replica, shapes: Shapes, *, holds: bool) -> dict[str, dict[str, torch.Tensor]]:
    """The whole tensors in host memory, by file and name. All ranks call it with equal `shapes`.

    A rank that does not hold current rows adds none. The bytes are summed as integers, with zeros
    from all ranks but one: Horovod does not sum all types.
    """
    own = rank.sharded_tensors()
    found: dict[str, dict[str, torch.Tensor]] = {}
    for file, tensors in shapes.items():
        found[file] = {}
        for name, (shape, dtype) in tensors.items():
            whole = torch.zeros(shape, dtype=getattr(torch, dtype))
            if holds:
                value, sharded = own[file][name]
                sharded.place_in(whole, value)
            padding = torch.zeros(-whole.nbytes % 4, dtype=torch.uint8)
            content = torch.cat([whole.reshape(-1).view(torch.uint8), padding])
            rank.collective.sum_(content.view(torch.int32), f"whole {name}")
            found[file][name] = content[: whole.nbytes].view(whole.dtype).view(shape)
    return found


def hold_all_rows(rank: Replica, source: int, *, holds: bool) -> bool:
    """In a new group: give every rank all rows, if they are all still there.

    All ranks call it. `source` has the newest state; `holds`: whether this rank has it too. Returns
    whether all rows are there.
    """
    peers, layers = rank.collective, rank.rows_of_layers()
    if not layers:
        return True
    # By rank: whether it holds a part only, and whether it has the newest state and all rows. A
    # rank may hold all if others were lost while the last group formed.
    found = torch.zeros(2 * peers.size + len(layers), dtype=torch.float64)
    found[peers.rank] = rank.is_cut
    found[peers.size + peers.rank] = holds and not rank.is_cut
    if holds:
        found[2 * peers.size :] = torch.tensor([held for held, _ in layers])
    cut, whole, held = peers.sum_(found, "rows held").split([peers.size, peers.size, len(layers)])
    if not cut.any():
        return True
    if whole.any():
        source = int(whole.argmax())
        holds = peers.rank == source
    elif held.tolist() != [total for _, total in layers]:
        return False
    shapes = take_document(peers, row_shapes(rank) if peers.rank == source else {}, "rows", source)
    rank.hold_all_rows(whole_rows(rank, shapes, holds=holds))
    return True
