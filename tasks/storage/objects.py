"""Objects under keys: the interface to a store, which a folder and an S3 server share.

It asks only what every S3 server promises: put, get, list, delete, conditional create and swap. Modules
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
"""What is written; a view is done with when the call returns"""


@dataclass(frozen=True)
class ObjectInfo:
    """A key, the size of what lies there in bytes, and the server's mark of this version of it (None in a folder)."""

    key: str
    size: int
    etag: str | None = None


class ObjectStore(Protocol):
    """Keys are relative paths with /. A missing key is FileNotFoundError; a store out of reach, ServiceUnreachable."""

    uri: str

    def get(self, key: str) -> bytes: ...
    def put(self, key: str, data: Content) -> None: ...
    def create(self, key: str, data: Content, digest: str | None = None) -> bool:
        """Write only where nothing lies: True for the one writer that did.

        `digest` is the SHA-256 of the data where the caller knows it, so that it is not computed again.
        """
        ...

    def get_versioned(self, key: str) -> tuple[bytes, str]:
        """What lies there, and the mark of this version of it."""
        ...

    def swap(
        self, key: str, data: Content, version: str | None, digest: str | None = None
    ) -> str | None:
        """Write only where that version still lies (None: nothing): the mark of what lies there now, for the one writer that did.

        `digest` as in `create`.
        """
        ...

    def put_file(self, key: str, path: Path) -> None: ...
    def get_file(self, key: str, path: Path) -> None: ...
    def delete(self, *keys: str) -> None:
        """Take these away; what is not there is no error."""
        ...

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every object whose key begins with the prefix, in the order of the keys."""
        ...

    def folders(self, prefix: str = "") -> Iterator[str]:
        """The names directly below a prefix that ends in / (or is empty) that have objects below them."""
        ...


def checked_key(key: str) -> str:
    """The key, if it is one: relative, no `..`, plain characters. Raises BadInput."""
    if not _KEY.fullmatch(key):
        raise BadInput(
            f"key: got {key!r}; allowed: relative paths of letters, digits and . _ = + @ -"
        )
    return key


def sha256(data: Content) -> str:
    """The hexadecimal SHA-256 of some bytes."""
    return hashlib.sha256(data).hexdigest()


def get_verified(store: ObjectStore, key: str, digest: str) -> bytes:
    """An object whose SHA-256 is known. Raises CorruptArtefact where it is missing or differs."""
    try:
        data = store.get(key)
    except FileNotFoundError:
        raise CorruptArtefact(f"{store.uri}/{key}: missing") from None
    if sha256(data) != digest:
        raise CorruptArtefact(f"{store.uri}/{key}: changed since it was written (sha256 differs)")
    return data
