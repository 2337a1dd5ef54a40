"""Objects under keys, in any S3 server (minio SDK) or a folder: the only way trainwright reads and writes its store.

Uses what every S3 server promises: put, get, list, delete, conditional create. Step `store` (sealing a run) is
`tasks.store`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from trainwright.infra.local import s3_access
from trainwright.tasks.errors import BadInput, CorruptArtefact, ServiceUnreachable
from trainwright.tasks.settings import Settings, settings

_ENDPOINT = re.compile(
    r"https?://([A-Za-z0-9._-]+|\[[0-9a-fA-F:]+\])(:([1-9]\d{0,3}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d\d|655[0-2]\d|6553[0-5]))?/?"
)
LOCK_TIMEOUT_S = 10.0
_KEY = re.compile(r"^(?!\.{1,2}(/|$))[A-Za-z0-9._=+@-]+(/(?!\.{1,2}(/|$))[A-Za-z0-9._=+@-]+)*$")


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
    def put(self, key: str, data: bytes) -> None: ...
    def create(self, key: str, data: bytes) -> bool:
        """Write only where nothing lies: True for the one writer that did."""
        ...

    def get_versioned(self, key: str) -> tuple[bytes, str]:
        """What lies there, and the mark of this version of it."""
        ...

    def swap(self, key: str, data: bytes, version: str | None) -> bool:
        """Write only where that version still lies (None: nothing): True for the one writer that did."""
        ...

    def put_file(self, key: str, path: Path) -> None: ...
    def get_file(self, key: str, path: Path) -> None: ...
    def delete(self, key: str) -> None: ...
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every object whose key begins with the prefix, in the order of the keys."""
        ...

    def folders(self, prefix: str = "") -> Iterator[str]:
        """The names directly below a prefix that ends in / (or is empty) that have objects below them."""
        ...


def checked_key(key: str) -> str:
    """The key, if it is one: relative, no `..`, plain characters. Raises BadInput."""
    if not _KEY.fullmatch(key):
        raise BadInput(f"key: got {key!r}; allowed: relative paths of letters, digits and . _ = + @ -")
    return key


class FolderStore:
    """Objects as files of a folder. Writes are atomic: a reader sees the old bytes or the new."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.uri = root.as_uri()

    def _path(self, key: str) -> Path:
        return self.root / checked_key(key)

    def get(self, key: str) -> bytes:
        try:
            return self._path(key).read_bytes()
        except IsADirectoryError:
            raise CorruptArtefact(f"{self.uri}/{key}: a folder where a file should be") from None

    def put(self, key: str, data: bytes) -> None:
        part = self._part(key, data)
        part.replace(self._path(key))

    def create(self, key: str, data: bytes) -> bool:
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

    def swap(self, key: str, data: bytes, version: str | None) -> bool:
        if version is None:
            return self.create(key, data)
        part = self._part(key, data)
        try:
            with _locked(part.parent):  # among those that swap
                if self.get_versioned(key)[1] != version:
                    return False
                part.replace(self._path(key))
        except FileNotFoundError:
            return False
        finally:
            part.unlink(missing_ok=True)
        return True

    def _part(self, key: str, data: bytes) -> Path:
        target = self._path(key)
        name = ""
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(prefix=".part-", dir=target.parent)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            if name:
                Path(name).unlink(missing_ok=True)
            raise ServiceUnreachable(
                f"store {self.uri}: can't be written ({error.strerror}); free space there, or set TRAINWRIGHT_STORE",
                service="store", address=self.uri,
            ) from error  # fmt: skip
        return Path(name)

    def put_file(self, key: str, path: Path) -> None:
        self.put(key, path.read_bytes())

    def get_file(self, key: str, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.get(key))

    def delete(self, key: str) -> None:
        self._path(key).unlink(missing_ok=True)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        files = (path for path in self.root.rglob("*") if path.is_file() and not path.name.startswith(".part-"))
        for key, path in sorted((path.relative_to(self.root).as_posix(), path) for path in files):
            if key.startswith(prefix):
                yield ObjectInfo(key, path.stat().st_size)

    def folders(self, prefix: str = "") -> Iterator[str]:
        base = self.root / checked_key(prefix.rstrip("/")) if prefix else self.root
        if base.is_dir():
            yield from sorted(path.name for path in base.iterdir() if path.is_dir())


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """The folder to oneself. Raises ServiceUnreachable where another keeps it (it may be stopped) for LOCK_TIMEOUT_S."""
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
                        f"store {folder.as_uri()}: another process has locked this folder for {LOCK_TIMEOUT_S:g} s",
                        service="store", address=folder.as_uri(),
                    ) from None  # fmt: skip
                time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)


class S3Store:
    """Objects of a bucket, below a prefix."""

    def __init__(
        self, bucket: str, prefix: str, endpoint: str, access: str, secret: str, region: str,
        patience_s: float | None = None,
    ) -> None:  # fmt: skip
        import urllib3
        from minio import Minio

        self.bucket, self.prefix, self.endpoint = bucket, f"{prefix}/" if prefix else "", endpoint
        self.uri = f"s3://{bucket}/{prefix}".rstrip("/")
        if patience_s is None:
            timeout, tries = urllib3.Timeout(connect=5, read=60), 3
        else:  # sending, too, is held to what is called connect
            timeout, tries = urllib3.Timeout(connect=patience_s, read=patience_s), 0
        pool = urllib3.PoolManager(
            timeout=timeout,
            retries=urllib3.Retry(
                total=tries, connect=min(tries, 2), backoff_factor=0.2, status_forcelist=[500, 502, 503, 504]
            ),
        )
        split = urlsplit(endpoint)
        self.client = Minio(
            split.netloc, access_key=access, secret_key=secret, region=region, secure=split.scheme == "https",
            http_client=pool,
        )  # fmt: skip
        self._bucket_known = False

    def get(self, key: str) -> bytes:
        return self.get_versioned(key)[0]

    def get_versioned(self, key: str) -> tuple[bytes, str]:
        with self._errors(key):
            response = self.client.get_object(self.bucket, self.prefix + checked_key(key))
            try:
                return bytes(response.read()), str(response.headers.get("etag", ""))
            finally:
                response.close()
                response.release_conn()

    def put(self, key: str, data: bytes) -> None:
        with self._errors(key):
            self._ensure_bucket()
            self.client.put_object(self.bucket, self.prefix + checked_key(key), io.BytesIO(data), len(data))

    def create(self, key: str, data: bytes) -> bool:
        return self.swap(key, data, None)

    def swap(self, key: str, data: bytes, version: str | None) -> bool:
        from minio.error import S3Error

        with self._errors(key):
            self._ensure_bucket()
            try:
                # The SDK's public put_object turns If-None-Match into user metadata and overwrites; a test holds this.
                headers: dict[str, Any] = {"If-None-Match": "*"} if version is None else {"If-Match": version}
                self.client._put_object(self.bucket, self.prefix + checked_key(key), data, headers)
            except S3Error as error:
                if error.code in ("PreconditionFailed", "ConditionalRequestConflict"):
                    return False
                if version is not None and error.code in ("NoSuchKey", "NoSuchObject"):
                    return False  # it was deleted meanwhile
                raise
        return True

    def put_file(self, key: str, path: Path) -> None:
        with self._errors(key):
            self._ensure_bucket()
            self.client.fput_object(self.bucket, self.prefix + checked_key(key), str(path))

    def get_file(self, key: str, path: Path) -> None:
        with self._errors(key):
            self.client.fget_object(self.bucket, self.prefix + checked_key(key), str(path))

    def delete(self, key: str) -> None:
        with self._errors(key):
            self.client.remove_object(self.bucket, self.prefix + checked_key(key))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        for item in self._listed(prefix, recursive=True):
            if not item.is_dir:
                yield ObjectInfo(item.object_name[len(self.prefix) :], item.size, item.etag)

    def folders(self, prefix: str = "") -> Iterator[str]:
        for item in self._listed(prefix, recursive=False):
            if item.is_dir:
                yield item.object_name.rstrip("/").rsplit("/", 1)[-1]

    def _listed(self, prefix: str, *, recursive: bool) -> Sequence[Any]:
        from minio.error import S3Error

        with self._errors(prefix):
            try:
                return list(self.client.list_objects(self.bucket, self.prefix + prefix, recursive=recursive))
            except S3Error as error:
                if error.code == "NoSuchBucket":
                    return []
                raise

    def _ensure_bucket(self) -> None:
        from minio.error import S3Error

        if not self._bucket_known:
            try:
                if not self.client.bucket_exists(self.bucket):
                    self.client.make_bucket(self.bucket)
            except S3Error as error:
                if error.code not in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
                    raise
            self._bucket_known = True

    def _errors(self, key: str) -> _S3Errors:
        return _S3Errors(self, key)


class _S3Errors:
    """Translates what the SDK raises into this project's errors; the secret never shows."""

    def __init__(self, store: S3Store, key: str) -> None:
        self.store, self.key = store, key

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        import urllib3
        from minio.error import MinioException, S3Error

        where = f"S3 server at {self.store.endpoint}"
        if isinstance(error, S3Error):
            if error.code in ("NoSuchKey", "NoSuchBucket", "NoSuchObject"):
                raise FileNotFoundError(f"{self.store.uri}/{self.key}") from None
            if error.code in ("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch"):
                raise ServiceUnreachable(
                    f"{where}: it refused the credentials ({error.code}); set TRAINWRIGHT_S3_ACCESS_KEY and "
                    "TRAINWRIGHT_S3_SECRET_KEY",
                    service="s3", address=self.store.endpoint,
                ) from None  # fmt: skip
            raise ServiceUnreachable(
                f"{where}: {error.code}: {error.message}", service="s3", address=self.store.endpoint
            ) from error
        if isinstance(error, urllib3.exceptions.HTTPError | MinioException | ConnectionError):
            raise ServiceUnreachable(
                f"{where} can't be reached; start the embedded one with `trainwright up`, or set "
                "TRAINWRIGHT_S3_ENDPOINT to another",
                service="s3", address=self.store.endpoint,
            ) from error  # fmt: skip


def open_store(uri: str, config: Settings | None = None, *, patience_s: float | None = None) -> ObjectStore:
    """The store at `s3://bucket/prefix` or `file:///folder`. Connects at the first use, not here.

    `patience_s` is for who has something better to do than wait: after so long without an answer, and without another try, the
    store counts as out of reach. Raises BadInput for another URI, ServiceUnreachable where the embedded S3 server was never
    started.
    """
    config = config or settings()
    split = urlsplit(uri)
    if split.scheme == "file" and split.netloc in ("", "localhost") and split.path:
        return FolderStore(Path(unquote(split.path)))
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
                service="s3", address="127.0.0.1",
            ) from error  # fmt: skip
        endpoint, credentials = embedded.endpoint, credentials or (embedded.access_key, embedded.secret_key)
    if credentials is None:  # the embedded server's keys are not shown to another server
        raise BadInput(
            "TRAINWRIGHT_S3_ACCESS_KEY, TRAINWRIGHT_S3_SECRET_KEY: not set, and needed with TRAINWRIGHT_S3_ENDPOINT"
        )
    if not _ENDPOINT.fullmatch(endpoint):  # not told: it may hold a password
        raise BadInput("TRAINWRIGHT_S3_ENDPOINT: allowed: http(s)://host:port, without user, password or path")
    return S3Store(split.netloc, prefix, endpoint, *credentials, config.s3_region, patience_s)


def sha256(data: bytes) -> str:
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
