"""Reads the files of a data source, without checking their values.

| source | content |
|---|---|
| builtin:digits | 1,797 handwritten digits, 8×8 pixels, from scikit-learn (Alpaydin, Kaynak, UCI) |
| .parquet, .csv | a table; the target is one of its columns |
| .npy | a table: a structured array, or rows × columns with the column names 0, 1, … |
| .npz | arrays with one entry per row; the target is one of them, all others are inputs |
| folder with index.csv | images: the column `file` (a path within the folder) and the target |
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
    """Data as the source holds it, one entry per row.

    `table` (pyarrow) is a table, the index of a folder of images, or the target column alone.
    `images` are arrays (channels, height, width) of uint8, or None if a file is not an image.
    """

    sha256: str
    table: Any
    arrays: dict[str, Array] = field(default_factory=dict)
    images: list[Array | None] | None = None
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


def read_table(path: Path) -> Any:
    """The pyarrow table in a .parquet, .npy or .csv file. Raises ValueError.

    Dictionary columns become plain values; decimals and float16 become float64.
    """
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
                f"an array of shape {array.shape} is not a table; "
                "allowed: rows × columns, or a structured array"
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
    """The arrays of a .npz file, one entry per row.

    Raises BadInput for different lengths, or if no array is the target.
    """
    import numpy as np
    import pyarrow as pa

    if not zipfile.is_zipfile(path):
        raise ValueError("it is not an npz file")
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    if target not in arrays or len(arrays) < 2:
        raise BadInput(
            f"data.target: got {target!r}; "
            f"allowed: one of two or more arrays of {path.name}: {_names(arrays)}"
        )
    lengths = {name: array.shape[0] if array.ndim else 0 for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise BadInput(
            f"data.uri: got {path} with arrays of different lengths ({listed}); "
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


def read_images(folder: Path, target: str) -> Raw:
    """The images listed in a folder's index. Raises BadInput as `image_files` does."""
    index, files = image_files(folder, target)
    return Raw(file_sha256(files), index, images=[_image(path) for path in files[1:]])


def image_files(folder: Path, target: str) -> tuple[Any, list[Path]]:
    """The index of a folder of images, and the paths of the index and of the images.

    Raises BadInput for images that do not exist or are outside the folder.
    """
    index = read_table(folder / INDEX)
    for column, name in (("data.uri", "file"), ("data.target", target)):
        if name not in index.column_names:
            raise BadInput(
                f"{column}: {folder / INDEX} has no column {name!r}; "
                f"it has: {_names(index.column_names)}"
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
        return None  # validation and `dataset` report the row
    return pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _names(names: Iterable[str]) -> str:
    listed = list(names)
    return (
        ", ".join(listed[:20]) + (f", … ({len(listed)} in all)" if len(listed) > 20 else "")
        or "none"
    )


def to_arrow(array: Array) -> Any:
    """A one-dimensional array as an Arrow array. Unlike `pa.array`, this does not import pandas."""
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
    """A column without missing values as an array of numbers; true and false become 1 and 0.

    Unlike Arrow's `to_numpy`, this does not import pandas.
    """
    import numpy as np
    import pyarrow as pa

    if pa.types.is_boolean(column.type):
        column = column.cast(pa.uint8())
    return np.from_dlpack(
        column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    )


def filled(column: Any, dtype: str, missing: float) -> Array:
    """An Arrow array of numbers of this type (not true and false), with a value for missing ones.

    Unlike Arrow's `fill_null`, this does not import pandas.
    """
    import numpy as np
    from pyarrow import compute

    if not column.null_count:
        return to_numpy(column)
    values = np.frombuffer(column.buffers()[1], dtype)[column.offset : column.offset + len(column)]
    return np.where(to_numpy(compute.is_null(column)), np.array(missing, dtype), values)


def file_sha256(paths: Iterable[Path]) -> str:
    """One digest of several files in order: the SHA-256 over the SHA-256 digests of the files."""
    whole = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()
