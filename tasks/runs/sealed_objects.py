"""A run's objects: what a manifest seals is compared with its SHA-256 whenever it is read.

The manifest of the run covers all but status, report and exports; report/ and each export/<kind>/
have manifests of their own. A manifest is read once, with the first object that it covers.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from pydantic import ValidationError

from trainwright.tasks.errors import CorruptArtefact
from trainwright.tasks.runs.artefacts.run_status import Manifest, SealedFile, Status
from trainwright.tasks.runs.value import Value
from trainwright.tasks.spec.documents import one_line
from trainwright.tasks.storage.objects import Content, ObjectInfo, ObjectStore, sha256

SEALED_APART = ("report/", "export/")
NOT_SEALED = (Manifest.FILE, Status.FILE)
_APART = re.compile(r"report/|export/[^/]+/")
_WAYS_OUT = {
    "": "restore the file from a copy, or train again with `trainwright run JOB --new`",
    "report/": "`trainwright analyze` writes it again",
    "export/": "`trainwright export` makes it again",
}


class _AnyManifest(Value):
    """What all manifests have."""

    files: dict[str, SealedFile]


class SealedObjects:
    """An ObjectStore rooted at a run. Reading raises CorruptArtefact for what is not as sealed.

    `stored` gives the same objects unchecked.
    """

    def __init__(self, stored: ObjectStore) -> None:
        self.stored, self.uri = stored, stored.uri
        self._run_files: Mapping[str, SealedFile] | None = None

    def get(self, key: str) -> bytes:
        with self._checking(key) as check:
            data = self.stored.get(key)
            check(data)
        return data

    def get_versioned(self, key: str) -> tuple[bytes, str]:
        with self._checking(key) as check:
            data, version = self.stored.get_versioned(key)
            check(data)
        return data, version

    def get_file(self, key: str, path: Path) -> None:
        with self._checking(key) as check:
            self.stored.get_file(key, path)
            check(path)

    def put(self, key: str, data: Content) -> None:
        self.stored.put(key, data)

    def create(self, key: str, data: Content, digest: str | None = None) -> bool:
        return self.stored.create(key, data, digest)

    def swap(
        self, key: str, data: Content, version: str | None, digest: str | None = None
    ) -> str | None:
        return self.stored.swap(key, data, version, digest)

    def put_file(self, key: str, path: Path) -> None:
        self.stored.put_file(key, path)

    def delete(self, *keys: str) -> None:
        self.stored.delete(*keys)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """As of any store; raises CorruptArtefact if an object with this prefix is missing."""
        listed = [*self.stored.list(prefix)]
        if not f"{prefix}/".startswith(SEALED_APART) and prefix not in NOT_SEALED:
            keys = {item.key for item in listed}
            for key in self._files_of_run() or ():
                if key.startswith(prefix) and key not in keys:
                    raise self._damaged(key, "missing")
        yield from listed

    def folders(self, prefix: str = "") -> Iterator[str]:
        return self.stored.folders(prefix)

    def sealed(self) -> bool:
        """Whether the run has a manifest, be it damaged."""
        try:
            return self._files_of_run() is not None
        except CorruptArtefact:
            return True

    @contextlib.contextmanager
    def _checking(self, key: str) -> Iterator[Callable[[bytes | Path], None]]:
        """Around a read: gives the check of what was read, if a manifest covers the key."""
        sealed = self._sealed(key)

        def check(read: bytes | Path) -> None:
            if sealed is None:
                return
            if key not in sealed:
                raise self._damaged(key, "is not among the files that were sealed")
            if sealed[key].sha256 != (
                _file_sha256(read) if isinstance(read, Path) else sha256(read)
            ):
                raise self._damaged(key, "changed since it was sealed (sha256 differs)")

        try:
            yield check
        except FileNotFoundError:
            if sealed is not None and key in sealed:
                raise self._damaged(key, "missing") from None
            raise

    def _sealed(self, key: str) -> Mapping[str, SealedFile] | None:
        """The files of the manifest that covers a key, by key; None if none does yet."""
        if key in NOT_SEALED:
            return None
        apart = _APART.match(key)
        if apart is None:  # export/ itself holds a list of the exports, which no manifest covers
            return None if key.startswith(SEALED_APART) else self._files_of_run()
        folder = apart[0]
        if key == f"{folder}{Manifest.FILE}":
            return None
        files = self._read_manifest(folder)  # it may be written again, so it is not kept
        return None if files is None else {f"{folder}{name}": file for name, file in files.items()}

    def _files_of_run(self) -> Mapping[str, SealedFile] | None:
        if self._run_files is None:
            self._run_files = self._read_manifest("")
        return self._run_files

    def _read_manifest(self, folder: str) -> Mapping[str, SealedFile] | None:
        key = f"{folder}{Manifest.FILE}"
        try:
            content = self.stored.get(key)
        except FileNotFoundError:
            return None
        try:
            return _AnyManifest.model_validate_json(content).files
        except ValidationError as error:
            raise self._damaged(key, one_line(error)) from None

    def _damaged(self, key: str, how: str) -> CorruptArtefact:
        way_out = _WAYS_OUT[next((one for one in SEALED_APART if key.startswith(one)), "")]
        return CorruptArtefact(f"{self.uri}/{key}: {how}; {way_out}")


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
