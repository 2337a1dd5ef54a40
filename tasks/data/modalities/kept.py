"""Inputs and targets that are not stored as arrays of rows: packed images, windows of series.

<folder>/NAME.json     what NAME consists of
<folder>/NAME/         packed images (see `modalities.images`)
<folder>/…-values.npy  the array of which windows are parts; those that share it share its file
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from trainwright.tasks.data.modalities.images import (
    ImageRows,
    ImageShape,
    PackedImages,
    pack,
)
from trainwright.tasks.data.modalities.series import WindowParts

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

Kept: TypeAlias = ImageRows | WindowParts


def kept_bytes(parts: Mapping[str, Kept]) -> int:
    """The size of the files that `save` writes, without headers."""
    images = sum(part.encoded_bytes for part in parts.values() if isinstance(part, ImageRows))
    arrays: dict[int, Array] = {}
    for part in parts.values():
        if isinstance(part, WindowParts):
            arrays |= {id(one): one for one in (part.values, part.starts)}
    return images + sum(array.nbytes for array in arrays.values())


def save(parts: Mapping[str, Kept], folder: Path) -> None:
    """Write parts by name into a folder. Raises OSError."""
    import numpy as np

    files: dict[int, str] = {}

    def file(array: Array, name: str) -> str:
        if id(array) not in files:
            files[id(array)] = name
            np.save(folder / name, array)
        return files[id(array)]

    for name, part in parts.items():
        if isinstance(part, ImageRows):
            pack(part.source, folder / name)
            layout: dict[str, Any] = {"images": name, "shape": part.image}
        else:
            layout = {
                "values": file(part.values, f"{name}-values.npy"),
                "starts": file(part.starts, f"{name}-starts.npy"),
                "begin": part.begin,
                "length": part.length,
            }
        (folder / f"{name}.json").write_text(json.dumps(layout))


def mapped(name: str, folder: Path) -> Kept | None:
    """A part that `save` wrote, mapped; None if it wrote none of this name.

    Raises OSError or ValueError if it is damaged.
    """
    import numpy as np

    if not (folder / f"{name}.json").exists():
        return None
    layout = json.loads((folder / f"{name}.json").read_text())
    if "images" in layout:
        source = PackedImages(folder / layout["images"])
        return ImageRows(source, ImageShape(*layout["shape"]))
    values, starts = (
        np.load(folder / layout[part], mmap_mode="r") for part in ("values", "starts")
    )
    return WindowParts(values, starts, layout["begin"], layout["length"])
