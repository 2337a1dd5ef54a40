"""Image files as pixels: one size and one number of channels, decoded when a batch needs them.

Images of different sizes are stretched or shrunk to one size. If all are greyscale, they have one
channel; else all have three (RGB), without transparency.

Ranks read images from one file, so that they need neither the source nor many open files:

    <folder>/encoded.bin    the bytes of all image files, one after another
    <folder>/ends.npy       where each one ends
    <folder>/files.json     their names, for messages
"""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from trainwright.tasks.errors import BadInput

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

    Array = np.ndarray[Any, Any]

LARGEST_SIDE = 224
"""Images of different sizes get at most this height and width, unless the job names a size."""
SMALL_PIXELS = 64 * 64
"""Images of at most this size are decoded once, and kept as pixels."""
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""What Pillow may read: for some other formats it starts programs, such as Ghostscript for EPS."""

_ORIENTATION = 0x0112
_GREY = ("1", "L", "I", "I;16", "I;16L", "I;16B", "I;16N")
_TOGETHER = 8
_MOST_THREADS = 16
_ENCODED, _ENDS, _FILES = "encoded.bin", "ends.npy", "files.json"


class ImageShape(NamedTuple):
    """The shape that all images of a set get."""

    channels: int
    height: int
    width: int


class ImageSource(Protocol):
    """Image files by row number."""

    def __len__(self) -> int: ...

    def content(self, row: int) -> Path | io.BytesIO:
        """An image's encoded bytes, or the path of its file."""

    def name(self, row: int) -> str:
        """What a message calls the image."""


class ImageFiles(Sequence["Array | None"]):
    """The image files of a folder: as a source, and as pixels of their own size.

    As a sequence, each item is uint8 (channels, height, width), or None if it can't be decoded.
    """

    def __init__(self, folder: Path, files: Sequence[str]) -> None:
        self.folder, self.files = folder, files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: Any) -> Any:
        try:
            return decoded(self.content(row), self.name(row))
        except BadInput:
            return None  # validation reports the row

    def content(self, row: int) -> Path:
        """The path of a file."""
        return self.folder / self.files[row]

    def name(self, row: int) -> str:
        """The file's name in the folder, after the folder's."""
        return f"{self.folder}: {self.files[row]}"


class PackedImages:
    """Image files in one file, mapped into memory. Raises OSError or ValueError if damaged."""

    def __init__(self, folder: Path) -> None:
        import numpy as np

        self._folder, self._ends = folder, np.load(folder / _ENDS, mmap_mode="r")
        size = int(self._ends[-1]) if len(self._ends) else 0
        if (folder / _ENCODED).stat().st_size != size:
            raise ValueError(f"{folder / _ENCODED} is damaged")
        self._bytes = np.memmap(folder / _ENCODED, mode="r") if size else np.empty(0, np.uint8)

    def __len__(self) -> int:
        return len(self._ends)

    def content(self, row: int) -> io.BytesIO:
        """An image's encoded bytes."""
        begin = self._ends[row - 1] if row else 0
        return io.BytesIO(self._bytes[begin : self._ends[row]].data)

    def name(self, row: int) -> str:
        """What a message calls the image."""
        return str(json.loads((self._folder / _FILES).read_text())[row])


def pack(source: ImageSource, folder: Path) -> None:
    """Copy image files, encoded as they are, into one file in a new folder."""
    import numpy as np

    folder.mkdir()
    ends = np.empty(len(source), dtype=np.int64)
    with (folder / _ENCODED).open("wb") as whole:
        for row in range(len(source)):
            content = source.content(row)
            with content.open("rb") if isinstance(content, Path) else content as one:
                shutil.copyfileobj(one, whole)
            ends[row] = whole.tell()
    np.save(folder / _ENDS, ends)
    names = [source.name(row) for row in range(len(source))]
    (folder / _FILES).write_text(json.dumps(names))


@dataclass(frozen=True)
class ImageRows:
    """Images as an array (rows, channels, height, width) of uint8 that decodes what is taken.

    Threads decode at the same time: Pillow works without Python's lock.
    """

    source: ImageSource
    image: ImageShape

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return (len(self.source), *self.image)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of a pixel."""
        import numpy as np

        return np.dtype(np.uint8)

    @property
    def nbytes(self) -> int:
        """The size of all pixels."""
        return math.prod(self.shape)

    def __len__(self) -> int:
        return len(self.source)

    @property
    def encoded_bytes(self) -> int:
        """The size of the encoded images."""
        contents = (self.source.content(row) for row in range(len(self.source)))
        return sum(
            one.stat().st_size if isinstance(one, Path) else one.getbuffer().nbytes
            for one in contents
        )

    def take(self, rows: Array) -> Array:
        """The images of some rows. Raises BadInput with the name of one that can't be decoded."""
        import numpy as np

        found = np.empty((len(rows), *self.image), dtype=np.uint8)

        def fill(first: int) -> None:
            for place in range(first, min(first + _TOGETHER, len(rows))):
                row = int(rows[place])
                try:
                    found[place] = decoded(self.source.content(row), "", self.image)
                except BadInput:
                    decoded(self.source.content(row), self.source.name(row), self.image)
                    raise

        for _ in self._threads.map(fill, range(0, len(rows), _TOGETHER)):
            pass
        return found

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return _executor()


def _executor() -> ThreadPoolExecutor:
    cores = len(os.sched_getaffinity(0))
    return ThreadPoolExecutor(min(cores, _MOST_THREADS), thread_name_prefix="decode")


def common_shape(source: ImageSource, size: tuple[int, int] | None = None) -> ImageShape:
    """The shape for all images of a source, by the headers of its files.

    `size` is (height, width). By default it is the images' own if they have one size, else the
    medians of their heights and widths, at most `LARGEST_SIDE`. Raises BadInput with the name of a
    file that is no image.
    """
    import numpy as np

    def header(row: int) -> tuple[int, int, int]:
        with _opened(source.content(row), source.name(row)) as image:
            height, width = image.height, image.width
            if _lies(image):
                height, width = width, height
            return (1 if image.mode in _GREY else 3), height, width

    with _executor() as threads:
        found = np.array(list(threads.map(header, range(len(source)))), dtype=np.int64)
    channels, sides = int(found[:, 0].max()), found[:, 1:]
    if size is None:
        median = np.median(sides, axis=0)
        size = tuple(median if (sides == median).all() else np.minimum(median, LARGEST_SIDE))
    height, width = (int(side) for side in size)
    return ImageShape(channels, height, width)


def decoded(source: Path | io.BytesIO, name: str, shape: ImageShape | None = None) -> Array:
    """An image's pixels as (channels, height, width), uint8: in this shape, else in its own.

    Raises BadInput with the image's name if it can't be read.
    """
    import numpy as np
    from PIL import Image

    with _opened(source, name) as image:
        if shape is not None:  # a JPEG of at least twice the size is decoded at a fraction of it
            sides = (shape.width, shape.height)
            image.draft(None, (sides[1], sides[0]) if _lies(image) else sides)
        image = _upright(image)
        if image.mode.startswith("I"):  # 16 bits a pixel
            picture = Image.fromarray((np.asarray(image) // 257).astype(np.uint8))
        else:
            picture = image.convert("L" if image.mode in ("1", "L") else "RGB")
        if shape is not None:
            picture = picture.convert("RGB" if shape.channels == 3 else "L")
            if picture.size != (shape.width, shape.height):
                size = (shape.width, shape.height)
                picture = picture.resize(size, Image.Resampling.BILINEAR)
        pixels = np.asarray(picture)
    return pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _orientation(image: Image) -> int:
    """How a camera says that a picture is to be turned (EXIF), 1 to 8; 1: as it is.

    Pillow itself turns what is not listed. EXIF data that can't be read does not count.
    """
    early = image.format == "PNG" and "exif" in image.info  # after the pixels, it is not looked for
    if not early and image.format not in ("JPEG", "MPO", "WEBP"):
        return 1
    with suppress(SyntaxError, ValueError, OSError, LookupError, struct.error):
        return int(image.getexif().get(_ORIENTATION, 1))
    return 1


def _lies(image: Image) -> bool:
    """Whether height and width change places when the picture is turned."""
    return 5 <= _orientation(image) <= 8


def _upright(image: Image) -> Image:
    """The picture, turned as its orientation says."""
    from PIL.Image import Transpose

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    turn = turns.get(_orientation(image))
    return image if turn is None else image.transpose(turn)


@contextmanager
def _opened(source: Path | io.BytesIO, name: str) -> Iterator[Image]:
    """An image whose header is read. What can't be decoded raises BadInput with its name."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(source, formats=FORMATS) as image:
            if image.mode == "F":
                raise ValueError("its pixels are fractions; allowed: whole numbers")
            yield image
    except (
        UnidentifiedImageError,
        OSError,
        SyntaxError,
        ValueError,
        Image.DecompressionBombError,
    ) as error:
        reason = "" if isinstance(error, UnidentifiedImageError) else f": {error}"
        raise BadInput(f"data.uri: {name} can't be read as an image{reason}") from error
