"""Where a rank notes its rows until the store has them: a file on the launcher's machine, that outlives the rank's process."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Protocol

FOLDER = "journal"


class Journal(Protocol):
    """Lines of JSON, the newest last."""

    def read(self) -> str | None:
        """What is there; None where nothing was noted."""
        ...

    def append(self, text: str) -> None:
        """Add whole lines."""
        ...

    def replace(self, text: str) -> None:
        """These lines, and no others: all at once."""
        ...

    def close(self) -> None:
        """Leave it as it is."""
        ...


class FileJournal:
    """A file of this machine."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def read(self) -> str | None:
        try:
            return self._path.read_text()
        except FileNotFoundError:
            return None

    def append(self, text: str) -> None:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a")
        self._file.write(text)
        self._file.flush()

    def replace(self, text: str) -> None:
        self.close()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".part")
        self._file = partial.open("w")
        self.append(text)
        partial.replace(self._path)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None


def journal_of(work: Path, rank: int) -> FileJournal:
    """The journal of a rank's steps below the launcher's work folder."""
    return FileJournal(work / FOLDER / f"steps-rank{rank}.jsonl")
