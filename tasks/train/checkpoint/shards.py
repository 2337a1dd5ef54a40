"""Builds safetensors files from bytes, and merges several into one. Loads no torch.

The format (https://huggingface.co/docs/safetensors): N as 8 bytes little-endian, N bytes of JSON,
then the data without gaps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

_LARGEST_ELEMENT = 8
"""In bytes. Empty tensors are sorted as if they had elements of this size."""


def layout(tensors: Iterable[tuple[str, str, list[int], int]]) -> tuple[bytes, dict[str, int]]:
    """The header of a file with these tensors (name, type, shape, bytes), and each one's offset.

    Tensors with larger elements come first, so that all are aligned.
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
    """Merge several safetensors files into one.

    Raises ValueError if a file is not valid, or two tensors have the same name.
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
