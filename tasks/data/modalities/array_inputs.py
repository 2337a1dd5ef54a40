"""How the arrays of an .npz file become a model's inputs and targets.

| array | the model gets |
|---|---|
| rows × a × b × c of unsigned or other numbers, or rows × a × b of uint8 | images: float32, \
unsigned ones scaled to 0..1 |
| other whole numbers, such as tokens | int64 |
| other numbers | float32 |

Axes are moved of images only, if `channels_last` says that channels are their last axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainwright.tasks.errors import BadInput
from trainwright.tasks.spec.data_spec import Channels, Task

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_MOST_CHANNELS = 4


def as_input(array: Array, task: Task, channels: Channels = "auto") -> Array:
    """A source's array as a model input. Raises BadInput for whole numbers beyond int64."""
    import numpy as np

    if not _is_image(array, task):
        return as_stored(array)
    if array.ndim == 3:
        array = array[:, None]
    elif channels_last(array, channels):
        array = array.transpose(0, 3, 1, 2)
    scale = float(np.iinfo(array.dtype).max) if array.dtype.kind == "u" else 1.0
    return np.ascontiguousarray(array, dtype=np.float32) / np.float32(scale)


def as_stored(array: Array) -> Array:
    """Whole numbers as int64, others as float32. Raises BadInput for those beyond int64."""
    import numpy as np

    whole = array.dtype.kind in "iu"
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise BadInput(
            f"data.uri: an array holds the whole number {array.max()}; allowed: at most 2**63 - 1"
        )
    return np.ascontiguousarray(array, dtype=np.int64 if whole else np.float32)


def looks_like_images(array: Array) -> bool:
    """Whether an array's type and shape are those of images."""
    return (array.ndim == 4 and array.dtype.kind != "i") or (
        array.ndim == 3 and array.dtype.str == "|u1"
    )


def _is_image(array: Array, task: Task) -> bool:
    return looks_like_images(array) or (task == "image-classification" and array.ndim in (3, 4))


def channels_last(array: Array, channels: Channels) -> bool:
    """Whether the last axis of rows × a × b × c is that of channels.

    It is by `auto` if it has at most 4 entries and the others have more; and if the numbers are
    signed, which feature maps are too, only if it has 3 entries or the others are alike.
    """
    _, first, second, last = array.shape
    if channels != "auto":
        return channels == "last"
    if last > _MOST_CHANNELS or min(first, second) <= _MOST_CHANNELS:
        return False
    return bool(array.dtype.kind == "u" or last == 3 or first == second)


def array_notes(arrays: Mapping[str, Array], task: Task, channels: Channels) -> list[str]:
    """For people: of which arrays axes are moved, and which stay whole numbers."""
    notes = []
    for name, array in arrays.items():
        image = _is_image(array, task)
        shape = " × ".join(map(str, array.shape[1:]))
        unclear = array.ndim == 4 and min(array.shape[1], array.shape[3]) <= _MOST_CHANNELS
        if image and array.ndim == 4 and channels_last(array, channels):
            way_out = "" if channels == "last" else "; data.channels: first keeps them"
            notes.append(
                f"array {name!r}: {shape} is read as height × width × channels, and channels are "
                f"moved to the front{way_out}"
            )
        elif image and unclear and channels == "auto" and array.shape[1] > _MOST_CHANNELS:
            notes.append(
                f"array {name!r}: {shape} is read as channels × height × width; "
                "data.channels: last moves the last axis to the front"
            )
        elif not image and array.dtype.kind in "iu":
            notes.append(
                f"array {name!r} holds whole numbers, which the model gets as int64; store "
                "quantities as float32"
            )
    return notes
