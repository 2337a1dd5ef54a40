"""The interface of a store: objects under keys.

It uses only what every S3 server supports: put, get, list, delete, conditional create and swap.
`folder` and `s3` implement it; `connect` opens a store by its URI.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trainwright.tasks.errors import BadInput, CorruptArtefact

_KEY = re.compile(r"^(?!\.{1,2}(/|$))[A-Za-z0-9._=+@-]+(/(?!\.{1,2}(/|$))[A-Za-z0-9._=+@-]+)*$")


Content = bytes | memoryview
"""The data of a write; a view is not used after the call returns."""


@dataclass(frozen=True)
class ObjectInfo:
    """A key, the object's size in bytes, and the server's tag of its version (None in a folder)."""

    key: str
    size: int
    etag: str | None = None


class ObjectStore(Protocol):
    """Keys are relative paths with /.

    Methods raise FileNotFoundError for a missing key, ServiceUnreachable if the store does not
    answer.
    """

    uri: str

    def get(self, key: str) -> bytes: ...
    def put(self, key: str, data: Content) -> None: ...
    def create(self, key: str, data: Content, digest: str | None = None) -> bool:
        """Write only if the key does not exist. Returns True to the one writer that created it.

        `digest`: the SHA-256 of the data, if the caller knows it; it is then not computed again.
        """
        ...

    def get_versioned(self, key: str) -> tuple[bytes, str]:
        """The object, and its version."""
        ...

    def swap(
        self, key: str, data: Content, version: str | None, digest: str | None = None
    ) -> str | None:
        """Write only if the object still has this version (None: does not exist).

        Returns the new version to the one writer that succeeded, None to others. `digest` as in
        `create`.
        """
        ...

    def put_file(self, key: str, path: Path) -> None: ...
    def get_file(self, key: str, path: Path) -> None: ...
    def delete(self, *keys: str) -> None:
        """Delete the objects; missing keys are ignored."""
        ...

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every object whose key begins with the prefix, sorted by key."""
        ...

    def folders(self, prefix: str = "") -> Iterator[str]:
        """The names of folders directly below a prefix, which is empty or ends in /."""
        ...


def checked_key(key: str) -> str:
    """The key. Raises BadInput unless it is a relative path of plain characters, without `..`."""
    if not _KEY.fullmatch(key):
        raise BadInput(
            f"key: got {key!r}; allowed: relative paths of letters, digits and . _ = + @ -"
        )
    return key


def sha256(data: Content) -> str:
    """The hexadecimal SHA-256 of some bytes."""
    return hashlib.sha256(data).hexdigest()


def get_verified(store: ObjectStore, key: str, digest: str) -> bytes:
    """An object with a known SHA-256. Raises CorruptArtefact if it is missing or differs."""
    try:
        data = store.get(key)
    except FileNotFoundError:
        raise CorruptArtefact(f"{store.uri}/{key}: missing") from None
    if sha256(data) != digest:
        raise CorruptArtefact(f"{store.uri}/{key}: changed since it was written (sha256 differs)")
    return data
