"""Tensors of which every rank holds some rows: for checkpoints, and to other ranks in new groups.

Rows go in pieces of bounded size: a rank needs memory for the rows that it keeps and one piece.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch  # noqa: TID253 - only ranks import this

from trainwright.tasks.train.checkpoint.files import MODEL, OPTIMIZER
from trainwright.tasks.train.exchange.collective import PIECE_BYTES, take_document
from trainwright.tasks.train.layouts.cut_tensors import Cuts

if TYPE_CHECKING:
    from trainwright.tasks.train.checkpoint.local_checkpoint import LocalCheckpoint
    from trainwright.tasks.train.rank.held_state import HeldState

Shapes = Mapping[str, Mapping[str, tuple[list[int], str]]]
"""By file and name: shape and type of a whole tensor."""


class HeldRows(NamedTuple):
    """Rows [begin, end) of a layer that a rank has and sends."""

    rank: int
    begin: int
    end: int


def row_shapes(rank: HeldState) -> Shapes:
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


def written_rows(rank: HeldState, writers: Sequence[int]) -> dict[str, dict[str, torch.Tensor]]:
    """The whole tensors that this rank writes to a checkpoint, by file and name.

    All ranks call it at once. Each tensor has one writer; if a rank of `writers` holds it, that is
    one of its holders, which has it already. Only rows of others are sent.
    """
    peers, written = rank.collective, dict.fromkeys(writers, 0)
    own = rank.sharded_tensors()
    found: dict[str, dict[str, torch.Tensor]] = {}
    for file, tensors in row_shapes(rank).items():
        found[file] = {}
        for name, (shape, kind) in tensors.items():
            (value, cut), dtype = own[file][name], getattr(torch, kind)
            held = cut.cuts or [(0, cut.total)] * peers.size
            holders = [one for one in writers if held[one][0] < held[one][1]]
            writer = min(holders or writers, key=lambda one: (written[one], one))
            written[writer] += math.prod(shape) * dtype.itemsize
            all_rows, no_rows = (0, cut.total), (0, 0)
            if held[writer] == all_rows:
                if writer == peers.rank:
                    found[file][name] = value.detach()
                continue
            cuts = {cut.name: [all_rows if one == writer else no_rows for one in range(peers.size)]}
            senders = {cut.name: senders_of(held, cut.total) or []}
            whole = _moved(rank, file, name, shape, dtype, senders, cuts)
            if writer == peers.rank:
                found[file][name] = whole
    return found


def _empty(shape: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeros as 32-bit integers, and the tensor of another shape and type in the same memory."""
    size = math.prod(shape) * dtype.itemsize
    content = torch.zeros(-(-size // 4), dtype=torch.int32)
    return content, content.view(torch.uint8)[:size].view(dtype).view(shape)


def move_rows(rank: HeldState, source: int, cuts: Mapping[str, Cuts], *, holds: bool) -> bool:
    """Let each rank hold its rows of some cuts, of layers that are sharded now.

    All ranks call it. Layers without cuts are held whole afterwards, in host memory. `source` has
    the newest state; `holds`: whether this rank has it too. If ranks hold only whole layers, or
    rows are lost, nothing changes. Returns whether all rows are there.
    """
    peers, layers = rank.collective, rank.sharded_layers
    if not layers:
        return True
    # By rank and layer: the rows that it has of the newest state, and whether it has a part only.
    # A rank may have all rows if others were lost while the last group formed.
    table = torch.zeros(peers.size, len(layers), 3, dtype=torch.float64)
    parts = [float(one.cuts is not None or one.is_blank) for one in layers]
    table[peers.rank, :, 2] = torch.tensor(parts, dtype=torch.float64)
    if holds:
        table[peers.rank, :, :2] = torch.tensor([one.own for one in layers], dtype=torch.float64)
    peers.sum_(table, "rows held")
    if not table[:, :, 2].any():
        return True
    senders: dict[str, list[HeldRows]] = {}
    for place, one in enumerate(layers):
        every = senders_of(table[:, place, :2].long().tolist(), one.total)
        if every is None:
            return False
        senders[one.name] = every
    shapes: Shapes = take_document(
        peers, row_shapes(rank) if peers.rank == source else {}, "rows", source
    )
    rows = {
        file: {
            name: _moved(rank, file, name, shape, getattr(torch, dtype), senders, cuts)
            for name, (shape, dtype) in tensors.items()
        }
        for file, tensors in shapes.items()
    }
    # A barrier: until all have their rows, they keep those that they had.
    peers.sum_(torch.zeros(1, dtype=torch.float64), "rows moved")
    rank.take_rows(rows, cuts)
    return True


def load_rows(
    rank: HeldState,
    checkpoint: LocalCheckpoint | None,
    cuts: Mapping[str, Cuts],
    built: Mapping[str, torch.Tensor],
) -> None:
    """Let each rank hold its rows of some cuts from a checkpoint, which the first rank has.

    All ranks call it; others than the first pass None. `built`: tensors that checkpoints don't
    have, by name.
    """
    peers, found = rank.collective, dict[str, dict[str, tuple[list[int], str]]]()
    if checkpoint is not None:
        of = rank.cut_names(checkpoint.names(OPTIMIZER))
        names = {MODEL: [name for name in of[MODEL] if name not in built], OPTIMIZER: of[OPTIMIZER]}
        for file, some in names.items():
            found[file] = {}
            for name in some:
                if shape := checkpoint.shape(file, name):
                    found[file][name] = shape, checkpoint.kind(file, name)
    shapes: Shapes = take_document(peers, found, "checkpoint", 0)
    senders = {one.name: [HeldRows(0, 0, one.total)] for one in rank.sharded_layers}
    rows: dict[str, dict[str, torch.Tensor]] = {MODEL: dict(built), OPTIMIZER: {}}
    for file, tensors in shapes.items():
        for name, (shape, kind) in tensors.items():

            def read(begin: int, end: int, file: str = file, name: str = name) -> torch.Tensor:
                assert checkpoint is not None
                return checkpoint.rows(file, name, begin, end)

            dtype = getattr(torch, kind)
            rows[file][name] = _moved(rank, file, name, shape, dtype, senders, cuts, read)
    rank.take_rows(rows, cuts)


def senders_of(held: Sequence[Sequence[int]], total: int) -> list[HeldRows] | None:
    """Which rank sends which rows, each row once; `held`: the rows [begin, end) of each rank.

    None if nobody has one of them.
    """
    found: list[HeldRows] = []
    at = 0
    while at < total:
        further = [(end, -number) for number, (begin, end) in enumerate(held) if begin <= at < end]
        if not further:
            return None
        end, number = max(further)
        found.append(HeldRows(-number, at, end))
        at = end
    return found


def _moved(
    rank: HeldState,
    file: str,
    name: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    senders: Mapping[str, Sequence[HeldRows]],
    cuts: Mapping[str, Cuts],
    read: Callable[[int, int], torch.Tensor] | None = None,
) -> torch.Tensor:
    """This rank's rows of a tensor, in host memory.

    `read` gives some rows that this rank sends; None: of what it holds.
    """
    peers, layer = rank.collective, rank.sharded_of(file, name)
    wanted = cuts.get(layer.name, [(0, layer.total)] * peers.size)
    begin, end = wanted[peers.rank]
    found = torch.empty([end - begin, *shape[1:]], dtype=dtype)
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    if not row_bytes:
        return found
    step = max(1, PIECE_BYTES // row_bytes)
    for sender in senders[layer.name]:
        for first in range(sender.begin, sender.end, step):
            last = min(first + step, sender.end)
            takers = [
                number for number, (low, high) in enumerate(wanted) if low < last and first < high
            ]
            content, piece = _empty([last - first, *shape[1:]], dtype)
            if sender.rank == peers.rank:
                if read is not None:
                    piece.copy_(read(first, last))
                else:
                    value, _ = rank.sharded_tensors()[file][name]
                    offset = layer.own[0]
                    piece.copy_(value.detach()[first - offset : last - offset])
            if takers not in ([], [sender.rank]):
                peers.sum_(content, f"rows {name} {first}")
            low, high = max(begin, first), min(end, last)
            if low < high:
                found[low - begin : high - begin] = piece[low - first : high - first]
    return found
