"""A folder as an object store, for one machine or several that share a file system."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from trainwright.infra.private_files import new_private_folders
from trainwright.tasks.errors import CorruptArtefact, ServiceUnreachable
from trainwright.tasks.storage.objects import Content, ObjectInfo, checked_key, sha256

LOCK_TIMEOUT_S = 10.0


class FolderStore:
    """Objects as files of a folder. Writes are atomic: readers see the old or the new bytes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.uri = root.as_uri()

    def _path(self, key: str) -> Path:
        return self.root / checked_key(key)

    def missing(self) -> str | None:
        """The missing container, in words; None if it exists. The first write creates it."""
        return None if self.root.is_dir() else f"folder {self.root}"

    def get(self, key: str) -> bytes:
        try:
            return self._path(key).read_bytes()
        except IsADirectoryError:
            raise CorruptArtefact(f"{self.uri}/{key}: is a folder, expected a file") from None

    def put(self, key: str, data: Content) -> None:
        part = self._part(key, data)
        part.replace(self._path(key))

    def create(self, key: str, data: Content, digest: str | None = None) -> bool:
        part = self._part(key, data)
        try:
            os.link(part, self._path(key))
        except FileExistsError:
            return False
        finally:
            part.unlink()
        return True

    def get_versioned(self, key: str) -> tuple[bytes, str]:
        data = self.get(key)
        return data, sha256(data)

    def swap(
        self, key: str, data: Content, version: str | None, digest: str | None = None
    ) -> str | None:
        written = digest or sha256(data)
        if version is None:
            return written if self.create(key, data) else None
        part = self._part(key, data)
        try:
            with _locked(part.parent):  # excludes other swaps
                if self.get_versioned(key)[1] != version:
                    return None
                part.replace(self._path(key))
        except FileNotFoundError:
            return None
        finally:
            part.unlink(missing_ok=True)
        return written

    def _part(self, key: str, data: Content) -> Path:
        target = self._path(key)
        name = ""
        try:
            new_private_folders(target.parent)
            descriptor, name = tempfile.mkstemp(prefix=".part-", dir=target.parent)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            if name:
                Path(name).unlink(missing_ok=True)
            raise ServiceUnreachable(
                f"store {self.uri}: can't be written ({error.strerror}); {_remedy(error)}, or set "
                "TRAINWRIGHT_STORE",
                service="store",
                address=self.uri,
            ) from error
        return Path(name)

    def put_file(self, key: str, path: Path) -> None:
        self.put(key, path.read_bytes())

    def get_file(self, key: str, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.get(key))

    def delete(self, *keys: str) -> None:
        for key in keys:
            self._path(key).unlink(missing_ok=True)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        files = (
            path
            for path in self.root.rglob("*")
            if path.is_file() and not path.name.startswith(".part-")
        )
        for key, path in sorted((path.relative_to(self.root).as_posix(), path) for path in files):
            if key.startswith(prefix):
                yield ObjectInfo(key, path.stat().st_size)

    def folders(self, prefix: str = "") -> Iterator[str]:
        base = self.root / checked_key(prefix.rstrip("/")) if prefix else self.root
        if base.is_dir():
            yield from sorted(path.name for path in base.iterdir() if path.is_dir())


def _remedy(error: OSError) -> str:
    denied = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
    return f"let the user {os.geteuid()} write there" if denied else "free space there"


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Locks the folder. Raises ServiceUnreachable if another process holds the lock too long.

    That is LOCK_TIMEOUT_S: a holder that takes longer may have been stopped.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        until = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise ServiceUnreachable(
                        f"store {folder.as_uri()}: another process has held the lock on this "
                        f"folder for {LOCK_TIMEOUT_S:g} s",
                        service="store",
                        address=folder.as_uri(),
                    ) from None
                time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)
