"""Safetensors files out of tensors' bytes, and one out of several. Loads no torch.

Format (https://huggingface.co/docs/safetensors): 8 bytes little-endian N, N bytes of JSON, the data without gaps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

_LARGEST_ELEMENT = 8
"""in bytes; also taken for tensors without one, whose place is to be aligned for any"""


def layout(tensors: Iterable[tuple[str, str, list[int], int]]) -> tuple[bytes, dict[str, int]]:
    """How a file of these tensors (name, type, shape, bytes) begins, and where in it each one's data lies, in that order."""
    header: dict[str, Any] = {}
    at = 0
    for name, dtype, shape, size in sorted(
        tensors, key=_element_size, reverse=True
    ):  # so that each is aligned
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
    """One file of the tensors of several. Raises ValueError where one is no safetensors file, or a name comes twice."""
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
