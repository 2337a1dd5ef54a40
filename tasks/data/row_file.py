"""Reads rows of a large array file without mapping it.

The pages of a mapped file count as memory of the process that reads them, and one row may bring in
a megabyte. Here a process holds only the rows that it asked for.
"""

from __future__ import annotations

import itertools
import math
import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_GAP_BYTES = 4096
"""Rows that are not further apart than this are read together."""
_RUN_BYTES = 2**20


class RowFile:
    """An array in NumPy's file format, rows first, which is read by rows.

    Raises ValueError if the file is not such an array, OSError if it can't be read.
    """

    def __init__(self, path: Path) -> None:
        import numpy as np

        found = np.load(path, mmap_mode="r")  # checks the size; only its header is touched
        if not isinstance(found, np.memmap) or not found.flags.c_contiguous:
            raise ValueError(f"{path} is not an array by rows")
        self.shape, self.dtype, self.nbytes = found.shape, found.dtype, found.nbytes
        self._begin = found.offset
        self._row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, rows: slice) -> Array:
        """Consecutive rows, or every n-th one."""
        import numpy as np

        begin, end, step = rows.indices(len(self))
        if step != 1:
            return self.take(np.arange(begin, end, step))
        return self._run(begin, max(begin, end))

    def take(self, rows: Array) -> Array:
        """Some rows, in any order. Neighbours are read together."""
        import numpy as np

        found = np.empty((len(rows), *self.shape[1:]), self.dtype)
        places = np.argsort(rows, kind="stable")
        rising = np.asarray(rows)[places]
        for begin, end in self._runs(rising):
            first = int(rising[begin])
            part = self._run(first, int(rising[end - 1]) + 1)
            found[places[begin:end]] = part[rising[begin:end] - first]
        return found

    def _runs(self, rising: Array) -> list[tuple[int, int]]:
        """Parts of rising row numbers that are read together, as (begin, end)."""
        import numpy as np

        if not len(rising):
            return []
        bytes_at = rising.astype(np.int64) * self._row_bytes
        far = np.diff(bytes_at) > max(_GAP_BYTES, self._row_bytes)
        # A long run is cut, so that the gaps in it cost little memory.
        far |= np.diff(bytes_at // max(_RUN_BYTES, self._row_bytes)) > 0
        cuts = [0, *(np.flatnonzero(far) + 1).tolist(), len(rising)]
        return list(itertools.pairwise(cuts))

    def _run(self, begin: int, end: int) -> Array:
        import numpy as np

        part = np.empty((end - begin, *self.shape[1:]), self.dtype)
        content = memoryview(part.reshape(-1).view(np.uint8).data)
        at = self._begin + begin * self._row_bytes
        while content:
            count = os.preadv(self._file, [content], at)
            if not count:
                raise OSError("the file of prepared data was cut off")
            content, at = content[count:], at + count
        return part
