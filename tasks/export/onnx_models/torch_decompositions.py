"""Operations that ONNX lacks, made of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch  # noqa: TID253 - this runs in a separate process


def searchsorted(
    sorted_sequence: torch.Tensor,
    values: torch.Tensor,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: torch.Tensor | None = None,
) -> torch.Tensor:
    """`torch.searchsorted` by binary search in all rows at once.

    Of each value, `place` is a number of elements known to come before it; it grows by halves.
    """
    if sorter is not None:
        sorted_sequence = sorted_sequence.gather(-1, sorter)
    size = sorted_sequence.shape[-1]
    rows = sorted_sequence.expand(*values.shape[:-1], size)
    after = right or side == "right"
    place = torch.zeros_like(values, dtype=torch.int64)
    step = 1 << (int(size).bit_length() - 1) if size else 0
    while step:
        further = place + step
        found = rows.gather(-1, (further - 1).clamp(max=size - 1))
        before = found <= values if after else found < values
        place = torch.where((further <= size) & before, further, place)
        step //= 2
    return place.to(torch.int32) if out_int32 else place


_OURS: dict[Any, Callable[..., Any]] = {torch.ops.aten.searchsorted.Tensor: searchsorted}


def without_gaps(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program without operations that are listed here."""
    if any(node.target in _OURS for node in program.graph.nodes):
        done: torch.export.ExportedProgram = program.run_decompositions(_OURS)
        return done
    return program
