"""Safetensors files made of tensors' bytes, and one file made of several. Loads no torch.

The format (https://huggingface.co/docs/safetensors): 8 bytes little-endian N, N bytes of JSON, then
the data without gaps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

_LARGEST_ELEMENT = 8
"""bytes; tensors without elements are placed as if they had such ones"""


def layout(tensors: Iterable[tuple[str, str, list[int], int]]) -> tuple[bytes, dict[str, int]]:
    """The beginning of a file of these tensors (name, type, shape, bytes), and each one's offset.

    Tensors with larger elements come first, so that each is aligned.
    """
    header: dict[str, Any] = {}
    at = 0
    for name, dtype, shape, size in sorted(tensors, key=_element_size, reverse=True):
        if name in header:
            raise ValueError(f"two tensors are named {name!r}")
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    beginning = len(text).to_bytes(8, "little") + text
    return beginning, {
        name: len(beginning) + one["data_offsets"][0] for name, one in header.items()
    }


def _element_size(tensor: tuple[str, str, list[int], int]) -> int:
    count = math.prod(tensor[2])
    return tensor[3] // count if count else _LARGEST_ELEMENT


def merged(files: list[bytes]) -> bytes:
    """One file of the tensors of several.

    Raises ValueError if one is no safetensors file, or a name comes twice.
    """
    from safetensors import SafetensorError, deserialize

    if len(files) == 1:
        return files[0]
    try:
        parts = [part for file in files for part in deserialize(file)]  # type: ignore[no-untyped-call]  # it has no types
    except SafetensorError as error:
        raise ValueError(str(error)) from error
    beginning, places = layout(
        (name, one["dtype"], list(one["shape"]), len(one["data"])) for name, one in parts
    )
    data = {name: one["data"] for name, one in parts}
    return b"".join([beginning, *(data[name] for name in places)])
