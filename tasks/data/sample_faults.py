"""What is wrong with samples that a model's source reads, in words: `model_reader` names them.

Values that are not finite, and a sample that is unlike another. Both are looked for only where
something has failed, or in the few samples that validation reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


def not_finite(
    inputs: Mapping[str, Array], targets: Array, *, keep_missing: bool
) -> tuple[int, str] | None:
    """The first sample of a batch with a value that is NaN or infinite; None if there is none.

    Its place in the batch, and its values, as in `inputs: 3 of 64 values are NaN`. With
    `keep_missing`, NaN is a value as any other.
    """
    import numpy as np

    found: dict[int, str] = {}
    for name, array in {**inputs, "targets": targets}.items():
        if array.dtype.kind not in "fc":
            continue
        missing, infinite = np.isnan(array) & (not keep_missing), np.isinf(array)
        bad = (missing | infinite).reshape(len(array), -1).any(1)
        if bad.any():
            place = int(bad.argmax())
            counts = (int(missing[place].sum()), "NaN"), (int(infinite[place].sum()), "infinite")
            found.setdefault(place, f"{name}: {_counted(counts, array[place].size)}")
    return min(found.items()) if found else None


def _counted(counts: Sequence[tuple[int, str]], size: int) -> str:
    """How many values are what, as in `3 of 64 values are NaN, 1 is infinite`."""
    parts = [(count, what) for count, what in counts if count]
    if size == 1:
        return f"the value is {parts[0][1]}"
    (first, kind), *others = parts
    said = [f"{first} of {size} values {_are(first)} {kind}"]
    return ", ".join([*said, *(f"{count} {_are(count)} {what}" for count, what in others)])


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def difference(sample: Any, other: Any, name: str = "") -> tuple[str, str, str] | None:
    """Where a sample is unlike another one: the part's name, what it is, and what the other's is.

    None if both have the same keys, lengths, types and shapes throughout.
    """
    kinds = _kind(sample), _kind(other)
    if kinds[0] != kinds[1]:
        return name, *kinds
    if isinstance(sample, Mapping):
        places: list[tuple[str, Any]] = [(f"{name}[{key!r}]", key) for key in sample]
    elif isinstance(sample, list | tuple):
        names = ["inputs", "targets"] if not name and len(sample) == 2 else None
        places = [
            (names[place] if names else f"{name}[{place}]", place) for place in range(len(sample))
        ]
    else:
        return None
    found = (difference(sample[key], other[key], inner) for inner, key in places)
    return next((one for one in found if one is not None), None)


def _kind(value: Any) -> str:
    """A value's type; of tensors and arrays also their shape, of dicts the keys."""
    kind = type(value).__name__
    if isinstance(value, Mapping):
        return f"a {kind} with the keys {', '.join(sorted(map(repr, value))) or 'none'}"
    if isinstance(value, list | tuple):
        return f"a {kind} of {len(value)}"
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None:
        return "None" if value is None else f"a value of type {kind}"
    return f"{kind} {tuple(shape)} {str(dtype).removeprefix('torch.')}"
