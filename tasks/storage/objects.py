"""Objects under keys, in any S3 server or a folder: the only way trainwright reads and writes its store.

Uses what every S3 server promises: put, get, list, delete, conditional create. The two kinds are `s3_store` and `folder_store`;
step `store` (sealing a run) is `tasks.store`.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import unquote, urlsplit

from trainwright.infra.local import s3_access
from trainwright.tasks.errors import BadInput, CorruptArtefact, ServiceUnreachable
from trainwright.tasks.settings import Settings, settings

if TYPE_CHECKING:
    from trainwright.tasks.storage.folder import FolderStore
    from trainwright.tasks.storage.s3 import S3Store

_ENDPOINT = re.compile(
    r"https?://([A-Za-z0-9._-]+|\[[0-9a-fA-F:]+\])(:([1-9]\d{0,3}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d\d|655[0-2]\d|6553[0-5]))?/?"
)
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


def open_store(
    uri: str, config: Settings | None = None, *, patience_s: float | None = None
) -> FolderStore | S3Store:
    """The store at `s3://bucket/prefix` or `file:///folder`. Connects at the first use, not here.

    `patience_s` is for who has something better to do than wait: after so long without an answer, and without another try, the
    store counts as out of reach. Raises BadInput for another URI, ServiceUnreachable where the embedded S3 server was never
    started.
    """
    from trainwright.tasks.storage.folder import FolderStore
    from trainwright.tasks.storage.s3 import S3Store

    config = config or settings()
    split = urlsplit(uri)
    if split.scheme == "file" and split.netloc in ("", "localhost") and split.path:
        folder = Path(unquote(split.path))
        if file := next((one for one in (folder, *folder.parents) if os.path.isfile(one)), None):
            raise BadInput(f"store: got {uri!r}; {file} is a file; allowed: a folder")
        return FolderStore(folder)
    if split.scheme != "s3" or not re.match(r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$", split.netloc):
        raise BadInput(f"store: got {uri!r}; allowed: s3://bucket/prefix or file:///folder")
    prefix = split.path.strip("/")
    if prefix:
        checked_key(prefix)
    endpoint, credentials = config.s3_endpoint, config.s3_credentials()
    if endpoint is None:
        try:
            embedded = s3_access(config.home)
        except OSError as error:
            raise ServiceUnreachable(
                "S3 server: none was set up here; start the embedded one with `trainwright up`, or set "
                "TRAINWRIGHT_S3_ENDPOINT, TRAINWRIGHT_S3_ACCESS_KEY and TRAINWRIGHT_S3_SECRET_KEY",
                service="s3",
                address="127.0.0.1",
            ) from error
        endpoint, credentials = (
            embedded.endpoint,
            credentials or (embedded.access_key, embedded.secret_key),
        )
    if credentials is None:  # the embedded server's keys are not shown to another server
        raise BadInput(
            "TRAINWRIGHT_S3_ACCESS_KEY, TRAINWRIGHT_S3_SECRET_KEY: not set, and needed with TRAINWRIGHT_S3_ENDPOINT"
        )
    if not _ENDPOINT.fullmatch(endpoint):  # not told: it may hold a password
        raise BadInput(
            "TRAINWRIGHT_S3_ENDPOINT: allowed: http(s)://host:port, without user, password or path"
        )
    return S3Store(split.netloc, prefix, endpoint, *credentials, config.s3_region, patience_s)


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
