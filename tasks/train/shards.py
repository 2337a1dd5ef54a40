"""Safetensors files out of tensors' bytes, and one out of several. Loads no torch.

Format (https://huggingface.co/docs/safetensors): 8 bytes little-endian N, N bytes of JSON, the data without gaps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

Piece = tuple[str, str, list[int], Any]
"""name, safetensors' name of the type, shape, bytes (or a view of them)"""


def assemble(pieces: Iterable[Piece]) -> bytes:
    """One file of these tensors. The data is copied once, and without the interpreter's lock."""
    header: dict[str, Any] = {}
    data, at = list[Any](), 0
    for name, dtype, shape, content in sorted(pieces, key=_element_size, reverse=True):  # so that each is aligned
        if name in header:
            raise ValueError(f"two tensors are named {name!r}")
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(content)]}
        data.append(content)
        at += len(content)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *data])


def _element_size(piece: Piece) -> int:
    return len(piece[3]) // max(1, math.prod(piece[2]))


def merged(files: list[bytes]) -> bytes:
    """One file of the tensors of several. Raises ValueError where one is no safetensors file, or a name comes twice."""
    from safetensors import SafetensorError, deserialize

    if len(files) == 1:
        return files[0]
    try:
        parts = [part for file in files for part in deserialize(file)]  # type: ignore[no-untyped-call]  # it has no types
    except SafetensorError as error:
        raise ValueError(str(error)) from error
    return assemble((name, one["dtype"], list(one["shape"]), one["data"]) for name, one in parts)
