"""What the files of a data source hold, read without judging.

| source | what it holds |
|---|---|
| builtin:digits | 1,797 handwritten digits, 8×8 pixels, shipped by scikit-learn (E. Alpaydin, C. Kaynak, UCI) |
| .parquet, .csv | a table, the target one of its columns |
| .npy | a table: a structured array, or rows × columns, whose columns are then called 0, 1, … |
| .npz | arrays with one entry a row; the target is one of them, all others are inputs |
| folder with index.csv | images: the column `file` (a path within the folder) and the target's column |
"""

from __future__ import annotations

import hashlib
import importlib.util
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.tasks.errors import BadInput
from trainwright.tasks.spec.job import DataSpec

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

INDEX = "index.csv"


@dataclass(frozen=True)
class Raw:
    """Data as its source holds it, one entry a row.

    `table` (pyarrow) has the rows of a table, the index of a folder of images, or the target's column alone. `images` are
    arrays (channels, height, width) of uint8, None where a file is no image.
    """

    sha256: str
    table: Any
    arrays: dict[str, Array] = field(default_factory=dict)
    images: list[Array | None] | None = None
    targets: Array | None = None  # where a row has several values to predict, which no column holds

    @property
    def is_table(self) -> bool:
        """Whether the inputs are the table's columns."""
        return not self.arrays and self.images is None

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return len(self.targets) if self.targets is not None else int(self.table.num_rows)


def read_digits(spec: DataSpec) -> Raw:
    """The digits that scikit-learn ships, read from its file: importing its loader costs a second and brings pandas."""
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
    """The file of digits that scikit-learn ships. Raises BadInput where it is not installed."""
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise BadInput(
            "data.uri: got builtin:digits; it needs scikit-learn, which is not installed"
        )
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if not path.is_file():
        raise BadInput(
            f"data.uri: got builtin:digits; scikit-learn came without it: there is no {path}"
        )
    return path


def read_table(path: Path) -> Any:
    """The pyarrow table in a .parquet, .npy or .csv file, dictionaries and decimals as plain values. Raises ValueError."""
    import numpy as np
    import pyarrow as pa
    from pyarrow import csv, parquet

    suffix = path.suffix.lower()
    if suffix == ".parquet":
        table = parquet.ParquetFile(path).read()
    elif suffix == ".npy":
        array = np.load(path, allow_pickle=False)
        if array.dtype.names is None and array.ndim != 2:
            raise ValueError(
                f"an array of shape {array.shape} is no table; allowed: rows × columns, or a structured array"
            )
        names = array.dtype.names or range(array.shape[1])
        columns = (array[name] if array.dtype.names else array[:, name] for name in names)
        table = pa.table({str(name): to_arrow(c) for name, c in zip(names, columns, strict=True)})
    elif path.stat().st_size == 0:
        table = pa.table({})
    else:
        table = csv.read_csv(path, convert_options=csv.ConvertOptions(strings_can_be_null=True))
    doubled = sorted({name for name in table.column_names if table.column_names.count(name) > 1})
    if doubled:
        raise ValueError(f"the column {doubled[0]!r} occurs twice")
    for number, entry in enumerate(table.schema):
        if pa.types.is_binary(entry.type) and path.suffix.lower() == ".csv":
            raise ValueError(f"the column {entry.name!r} is not UTF-8 text")
        if pa.types.is_dictionary(entry.type):
            table = table.set_column(
                number, entry.name, table.column(number).cast(entry.type.value_type)
            )
        elif pa.types.is_decimal(entry.type) or pa.types.is_float16(entry.type):
            table = table.set_column(number, entry.name, table.column(number).cast(pa.float64()))
    return table


def read_arrays(path: Path, target: str) -> Raw:
    """The arrays of a .npz file, one entry a row. Raises BadInput for unlike lengths and a target that is none of them."""
    import numpy as np
    import pyarrow as pa

    if not zipfile.is_zipfile(path):
        raise ValueError("it is no npz file")
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    if target not in arrays or len(arrays) < 2:
        raise BadInput(
            f"data.target: got {target!r}; allowed: one of two or more arrays of {path.name}: {_names(arrays)}"
        )
    lengths = {name: array.shape[0] if array.ndim else 0 for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise BadInput(
            f"data.uri: got {path} with arrays of unlike lengths ({listed}); allowed: one entry a row in each"
        )
    targets = arrays.pop(target)
    for name, array in arrays.items():
        if array.dtype.kind not in "biuf" or array.ndim < 1:
            raise BadInput(
                f"data.uri: got {path}, whose array {name!r} is {array.dtype} of shape {array.shape}; allowed: numbers, by row"
            )
    inputs = arrays if len(arrays) > 1 else {"inputs": next(iter(arrays.values()))}
    digest = file_sha256([path])
    if targets.ndim == 1:
        return Raw(digest, pa.table({target: to_arrow(targets)}), inputs)
    return Raw(digest, pa.table({}), inputs, targets=targets)


def read_images(folder: Path, target: str) -> Raw:
    """The images that a folder's index names. Raises BadInput as `image_files` does."""
    index, files = image_files(folder, target)
    return Raw(file_sha256(files), index, images=[_image(path) for path in files[1:]])


def image_files(folder: Path, target: str) -> tuple[Any, list[Path]]:
    """The index of a folder of images; its file, and those that it names. Raises BadInput for what is not there or outside."""
    index = read_table(folder / INDEX)
    for column, name in (("data.uri", "file"), ("data.target", target)):
        if name not in index.column_names:
            raise BadInput(
                f"{column}: {folder / INDEX} has no column {name!r}; it has: {_names(index.column_names)}"
            )
    paths = []
    for name in index.column("file").to_pylist():
        path = folder / str(name)
        if not path.resolve().is_relative_to(folder.resolve()):
            raise BadInput(
                f"data.uri: {folder / INDEX} names {name!r}; allowed: files within the folder"
            )
        if not path.is_file():
            raise BadInput(f"data.uri: {folder / INDEX} names {name!r}; there is no such file")
        paths.append(path)
    return index, [folder / INDEX, *paths]


def _image(path: Path) -> Array | None:
    import numpy as np
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            if image.mode == "F":
                return None
            if image.mode.startswith("I"):  # 16 bits a pixel
                pixels = (np.asarray(image) // 257).astype(np.uint8)
            else:
                pixels = np.asarray(image.convert("L" if image.mode in ("1", "L") else "RGB"))
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return None  # the row is named by validation, and by whoever loads it
    return pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _names(names: Iterable[str]) -> str:
    listed = list(names)
    return (
        ", ".join(listed[:20]) + (f", … ({len(listed)} in all)" if len(listed) > 20 else "")
        or "none"
    )


def to_arrow(array: Array) -> Any:
    """A one-dimensional array as an Arrow array. pa.array would import pandas, and so would Arrow's to_numpy."""
    import numpy as np
    import pyarrow as pa

    if array.dtype.kind in "US":
        texts = np.char.encode(array, "utf-8") if array.dtype.kind == "U" else array
        ends = np.concatenate([[0], np.cumsum(np.char.str_len(texts))]).astype(np.int64)
        buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(texts.tolist()))]
        return pa.Array.from_buffers(pa.large_string(), len(array), buffers)
    if array.dtype.kind not in "biuf":
        raise ValueError(f"it holds {array.dtype}; allowed: numbers, texts, true and false")
    kind = np.dtype(np.uint8) if array.dtype.kind == "b" else array.dtype.newbyteorder("=")
    values = pa.py_buffer(np.ascontiguousarray(array, dtype=kind))
    column = pa.Array.from_buffers(pa.from_numpy_dtype(kind), len(array), [None, values])
    return column.cast(pa.bool_()) if array.dtype.kind == "b" else column


def to_numpy(column: Any) -> Array:
    """A column of numbers, or of true and false as 1 and 0, without missing values, as an array."""
    import numpy as np
    import pyarrow as pa

    if pa.types.is_boolean(column.type):
        column = column.cast(pa.uint8())
    return np.from_dlpack(column.combine_chunks())


def file_sha256(paths: Iterable[Path]) -> str:
    """One checksum of several files, in their order: of the checksums of each."""
    whole = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()
