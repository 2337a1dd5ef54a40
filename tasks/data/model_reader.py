"""Data that a model's source reads: its `dataset(uri, part, **config)` replaces this room.

`part` is `train` or `validation`; the result is a map-style torch dataset of (input, target) pairs.
An optional `collate(samples)` makes a batch of samples; by default it is torch's. Ranks read
batches by row numbers, as of any other data; the rows of the validation part follow those of the
training part. The schema is derived by `model_schema`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from trainwright.estimator.trace.source import ModelDefinition, described
from trainwright.tasks.data.dataset import RowSplit
from trainwright.tasks.data.sample_faults import difference, not_finite
from trainwright.tasks.errors import BadInput
from trainwright.tasks.runs.artefacts.data_schema import DataSchema
from trainwright.tasks.spec.data_spec import DataSpec

if TYPE_CHECKING:
    import numpy as np
    import torch

    Array = np.ndarray[Any, Any]

PARTS = ("train", "validation")


class ModelReader:
    """What a model's source reads, as ranks use a `dataset.Dataset`. Samples are read in turn."""

    costly = True
    nbytes = 0
    """Nothing is stored."""

    def __init__(
        self,
        definition: ModelDefinition,
        spec: DataSpec,
        config: Mapping[str, Any],
        validated: DataSchema | None = None,
    ) -> None:
        """Raises BadInput if the source has no `dataset`, it fails, or is not as validated."""
        import numpy as np
        import torch

        make = definition.dataset
        if make is None:
            raise BadInput(
                "data.reader: got model; the model's source defines no function "
                "dataset(uri, part, **config) -> torch.utils.data.Dataset"
            )
        with _users_code(f"dataset({spec.uri!r}, …)"):
            parts = [make(spec.uri, part, **config) for part in PARTS]
            train, validation = (len(part) for part in parts)
        if min(train, validation) < 1:
            raise BadInput(
                f"data.uri: dataset({spec.uri!r}, …) has {train} samples to train and {validation} "
                "to validate; allowed: at least one each"
            )
        if validated and (validated.train_rows, validated.validation_rows) != (train, validation):
            raise BadInput(
                f"data.uri: dataset({spec.uri!r}, …) has {train} and {validation} samples, but had "
                f"{validated.train_rows} and {validated.validation_rows} when it was validated; "
                "--new starts a new run"
            )
        self.parts, self.spec, self._validated = parts, spec, validated
        self._collate = definition.collate or torch.utils.data.default_collate
        self.own_collate = definition.collate is not None
        self._one_thread = threading.Lock()
        self.split = RowSplit(np.arange(train), np.arange(train, train + validation))

    @property
    def schema(self) -> DataSchema:
        """The validated schema."""
        assert self._validated is not None
        return self._validated

    def names(self) -> dict[str, list[str]]:
        """The names of the classes, under the target's name."""
        classes = self.schema.classes
        return {} if classes is None else {self.schema.target: classes}

    @property
    def row_bytes(self) -> int:
        """The size of a row as the model gets it."""
        import numpy as np

        return sum(
            math.prod(shape) * np.dtype(self.schema.input_dtypes[name]).itemsize
            for name, shape in self.schema.inputs.items()
        )

    def in_epoch(self, epoch: int) -> ModelReader:
        """The same data: the source does not know of epochs."""
        return self

    def batch(self, rows: Array) -> tuple[dict[str, Array], Array]:
        """The inputs by name and the targets of some rows, as `collate` gives them.

        Inputs in tuples, or in dicts within dicts, have their places as names, such as `1.mask`.
        Raises BadInput if the user's code fails, or gives no pair of tensors.
        """
        inputs, targets = self._collated(rows)
        return {name: one.numpy() for name, one in _named(inputs).items()}, targets.numpy()

    @property
    def nesting(self) -> Any:
        """See `DataSchema.nesting`."""
        inputs, _ = self._collated(self.split.train[:1])
        flat = all(not isinstance(part, Mapping | list | tuple) for part in _parts(inputs).values())
        return None if flat and not isinstance(inputs, list | tuple) else _nesting(inputs)

    def _collated(self, rows: Array) -> tuple[Any, torch.Tensor]:
        import torch

        with self._one_thread:
            samples = [self.sample(row) for row in rows.tolist()]
            try:
                with _users_code("collate"):
                    pair = self._collate(samples)
            except BadInput as error:
                if not self.own_collate:
                    self.require_alike(rows, samples)
                elif (unlike := self._unlike(rows, samples)) is not None:
                    raise BadInput(f"{error}; {unlike}") from error
                raise
        if isinstance(pair, Sequence) and len(pair) == 2:
            tensors = [*_named(pair[0]).values(), pair[1]]
            if all(isinstance(one, torch.Tensor) and len(one) == len(rows) for one in tensors):
                return pair[0], pair[1]
        raise BadInput(
            f"model.source: collate gave {_shown(pair)} of {len(rows)} samples; allowed: a pair of "
            "inputs (a tensor, or tuples or dicts of them) and targets (a tensor), samples first"
        )

    def require_finite(self, rows: Array, inputs: Mapping[str, Array], targets: Array) -> None:
        """Raise BadInput for the first of some rows with a value that is NaN or infinite."""
        keep = self.spec.missing == "keep"
        found = not_finite(inputs, targets, keep_missing=keep)
        if found is not None:
            place, values = found
            may = "" if "NaN" not in values else "; data.missing: keep permits NaN"
            raise BadInput(f"data: {self._name(rows[place])}: {values}; allowed: finite ones{may}")

    def _place(self, row: int) -> tuple[int, int]:
        """The part that a row is of, and its place there."""
        train = len(self.split.train)
        return (0, row) if row < train else (1, row - train)

    def _name(self, row: int) -> str:
        part, place = self._place(int(row))
        return f"sample {place} of the part {PARTS[part]}"

    def sample(self, row: int) -> Any:
        """What the source's dataset gives as this row."""
        part, place = self._place(row)
        with _users_code(self._name(row)):
            return self.parts[part][place]

    def require_alike(self, rows: Array, samples: Sequence[Any]) -> None:
        """Raise BadInput for the first of these samples that is unlike the data's first one."""
        if (unlike := self._unlike(rows, samples)) is not None:
            raise BadInput(
                f"data: {unlike}; allowed: samples alike, or a collate(samples) in the model's "
                "source that makes a batch of them"
            )

    def _unlike(self, rows: Array, samples: Sequence[Any]) -> str | None:
        """The first sample that is unlike the data's first one, in words; None if all are alike."""
        first = self.sample(0)
        for row, sample in zip(rows.tolist(), samples, strict=True):
            if (found := difference(sample, first)) is not None:
                name, own, other = found
                where = f"{self._name(row)}: {name} is" if name else f"{self._name(row)} is"
                return f"{where} {own}, but {other} in {self._name(0)}"
        return None


@contextmanager
def _users_code(what: str) -> Iterator[None]:
    """Raise the errors of the model's source as BadInput, in one line."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise BadInput(f"model.source: {what} raised {described(error)}") from error


def _parts(value: Any) -> dict[str, Any]:
    """The parts of inputs by name; a tensor is its only part."""
    if isinstance(value, Mapping):
        return {str(name): part for name, part in value.items()}
    if isinstance(value, list | tuple):
        return {str(place): part for place, part in enumerate(value)}
    return {"inputs": value}


def _named(value: Any) -> dict[str, Any]:
    """The tensors of nested inputs by their places."""
    found: dict[str, Any] = {}
    for name, part in _parts(value).items():
        if isinstance(part, Mapping | list | tuple):
            found |= {f"{name}.{inner}": tensor for inner, tensor in _named(part).items()}
        else:
            found[name] = part
    return found


def _nesting(value: Any, path: str = "") -> Any:
    """The names that `_named` gives, nested as the inputs are."""
    if not isinstance(value, Mapping | list | tuple):
        return path
    parts = {
        name: _nesting(part, f"{path}.{name}" if path else name)
        for name, part in _parts(value).items()
    }
    return parts if isinstance(value, Mapping) else list(parts.values())


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_shown(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "(" + ", ".join(map(_shown, value[:4])) + ")"
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"{type(value).__name__} {tuple(shape)}"
