"""Reads arrays and images, without checking their values. (`table_source` reads tables.)

| source | content |
|---|---|
| builtin:digits | 1,797 handwritten digits, 8×8 pixels, from scikit-learn (Alpaydin, Kaynak, UCI) |
| .npz | arrays with one entry per row; the target is one of them, all others are inputs |
| folder with index.csv | images: the column `file` (a path within the folder) and the target |
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import struct
import tokenize
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.infra.memory_limit import usable_memory_bytes
from trainwright.tasks.data.modalities.images import ImageFiles
from trainwright.tasks.data.tables.arrow_numpy import to_arrow, to_numpy
from trainwright.tasks.data.tables.table_source import listed, npy_header, open_table
from trainwright.tasks.errors import BadInput
from trainwright.tasks.spec.data_spec import DataSpec

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

INDEX = "index.csv"
_LENGTHS_AT = 26
"""where a member's header in a zip file has the lengths of its name and of its extra field"""


@dataclass(frozen=True)
class Raw:
    """Data as the source holds it, one entry per row.

    `table` (pyarrow) is a table, the index of a folder of images, or the target column alone.
    `images` decodes a file when it is asked for.
    """

    sha256: str
    table: Any
    arrays: dict[str, Array] = field(default_factory=dict)
    images: ImageFiles | None = None
    targets: Array | None = None  # if each row has several values to predict

    @property
    def is_table(self) -> bool:
        """Whether the inputs are the table's columns."""
        return not self.arrays and self.images is None

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(self.targets) if self.targets is not None else int(self.table.num_rows)


def read_digits(spec: DataSpec) -> Raw:
    """The digits that scikit-learn ships.

    Read from its file, because importing scikit-learn's loader takes a second and loads pandas.
    """
    import numpy as np
    import pyarrow as pa
    from pyarrow import csv

    path = digits_path()
    table = csv.read_csv(path, read_options=csv.ReadOptions(autogenerate_column_names=True))
    values = np.stack([to_numpy(column) for column in table.columns], axis=1)
    images = (values[:, :64] / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    labels = pa.table({spec.target: to_arrow(values[:, 64])})
    return Raw(file_sha256([path]), labels, {"inputs": images})


def digits_path() -> Path:
    """The file of digits that scikit-learn ships. Raises BadInput if it is not installed."""
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise BadInput(
            "data.uri: got builtin:digits; it needs scikit-learn, which is not installed: "
            "pip install scikit-learn"
        )
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if not path.is_file():
        raise BadInput(f"data.uri: got builtin:digits; the installed scikit-learn lacks {path}")
    return path


def read_arrays(path: Path, target: str) -> Raw:
    """The arrays of a .npz file, one entry per row.

    Raises BadInput for different lengths, or if no array is the target.
    """
    import pyarrow as pa

    if not zipfile.is_zipfile(path):
        raise ValueError("it is not an npz file")
    arrays = npz_arrays(path)
    if target not in arrays or len(arrays) < 2:
        raise BadInput(
            f"data.target: got {target!r}; "
            f"allowed: one of two or more arrays of {path.name}: {listed(arrays) or 'none'}"
        )
    lengths = {name: array.shape[0] if array.ndim else 0 for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        sizes = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise BadInput(
            f"data.uri: got {path} with arrays of different lengths ({sizes}); "
            "allowed: one entry per row in each"
        )
    targets = arrays.pop(target)
    for name, array in arrays.items():
        if array.dtype.kind not in "biuf" or array.ndim < 1:
            raise BadInput(
                f"data.uri: got {path}, whose array {name!r} is {array.dtype} of shape "
                f"{array.shape}; allowed: numbers, by row"
            )
    inputs = arrays if len(arrays) > 1 else {"inputs": next(iter(arrays.values()))}
    digest = file_sha256([path])
    if targets.ndim == 1:
        return Raw(digest, pa.table({target: to_arrow(targets)}), inputs)
    return Raw(digest, pa.table({}), inputs, targets=targets)


def npz_arrays(path: Path) -> dict[str, Array]:
    """The arrays of a .npz file. Those that are not compressed are mapped. Raises ValueError."""
    import numpy as np

    found = {}
    with zipfile.ZipFile(path) as archive, np.load(path, allow_pickle=False) as file:
        for name in file.files:
            try:
                entry = archive.getinfo(f"{name}.npy")
            except KeyError:  # a member that is no array, which NumPy gives as bytes
                raise ValueError(f"its member {name!r} is not an array") from None
            with archive.open(entry) as member:
                try:
                    shape, by_column, dtype = npy_header(member)
                except (SyntaxError, tokenize.TokenError, RecursionError):
                    raise ValueError(f"the header of its array {name!r} is damaged") from None
                inside = member.tell()
            if min(shape, default=0) < 0:
                raise ValueError(f"the header of its array {name!r} has the shape {shape}")
            size = entry.file_size - inside
            if not dtype.hasobject and size < math.prod(shape) * dtype.itemsize:
                raise ValueError(
                    f"its array {name!r} has {size:,} bytes, too few for the shape {shape}"
                )
            if entry.compress_type != zipfile.ZIP_STORED and size > usable_memory_bytes():
                raise ValueError(
                    f"its array {name!r} unpacks to {size:,} bytes, more than this machine's "
                    "memory; store it by numpy.savez, without compression"
                )
            if entry.compress_type != zipfile.ZIP_STORED:
                found[name] = file[name]
            elif 0 in shape or not shape:
                found[name] = np.zeros(shape, dtype)
            else:
                offset = inside + _begin(path, entry)
                order: Any = "F" if by_column else "C"
                found[name] = np.memmap(path, dtype, "r", offset, shape, order)
    return found


def _begin(path: Path, entry: zipfile.ZipInfo) -> int:
    """Where a zip file's member begins that is not compressed."""
    with path.open("rb") as whole:  # the member's own header, whose length the index does not tell
        whole.seek(entry.header_offset + _LENGTHS_AT)
        lengths = struct.unpack("<HH", whole.read(4))
    return int(entry.header_offset + _LENGTHS_AT + 4 + sum(lengths))


def read_images(folder: Path, target: str) -> Raw:
    """The images listed in a folder's index. Raises BadInput as `image_files` does."""
    index, files = image_files(folder, target)
    names = [str(name) for name in index.column("file").to_pylist()]
    return Raw(file_sha256(files), index, images=ImageFiles(folder, names))


def image_files(folder: Path, target: str) -> tuple[Any, list[Path]]:
    """The index of a folder of images, and the paths of the index and of the images.

    Raises BadInput for images that do not exist or are outside the folder.
    """
    index = open_table(folder / INDEX, ["file", target], left=["file"]).read()
    for column, name in (("data.uri", "file"), ("data.target", target)):
        if name not in index.column_names:
            raise BadInput(
                f"{column}: {folder / INDEX} has no column {name!r}; "
                f"it has: {listed(index.column_names) or 'none'}"
            )
    paths = []
    for row, name in enumerate(index.column("file").to_pylist()):
        if name is None:
            raise BadInput(f"data.uri: {folder / INDEX}: row {row} names no file; allowed: a file")
        path = folder / str(name)
        if not path.resolve().is_relative_to(folder.resolve()):
            raise BadInput(
                f"data.uri: {folder / INDEX} names {name!r}; allowed: files within the folder"
            )
        if not path.is_file():
            raise BadInput(f"data.uri: {folder / INDEX} names {name!r}; there is no such file")
        paths.append(path)
    return index, [folder / INDEX, *paths]


def file_sha256(paths: Iterable[Path]) -> str:
    """One digest of several files in order: the SHA-256 over the SHA-256 digests of the files."""
    whole = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()
