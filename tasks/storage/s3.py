"""A bucket of any S3 server as an object store, through the minio SDK."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from trainwright.tasks import progress
from trainwright.tasks.errors import ServiceUnreachable
from trainwright.tasks.storage.objects import Content, ObjectInfo, checked_key

_DEFAULT_BUCKET = "trainwright"


class S3Store:
    """Objects of a bucket, below a prefix."""

    def __init__(
        self,
        bucket: str,
        prefix: str,
        endpoint: str,
        access: str,
        secret: str,
        region: str,
        patience_s: float | None = None,
    ) -> None:
        import urllib3

        from trainwright.tasks.storage.s3_client import S3Client

        self.bucket, self.prefix, self.endpoint = bucket, f"{prefix}/" if prefix else "", endpoint
        self.uri = f"s3://{bucket}/{prefix}".rstrip("/")
        if patience_s is None:
            timeout, tries = urllib3.Timeout(connect=5, read=60), 3
        else:  # urllib3 also applies the connect timeout to sending
            timeout, tries = urllib3.Timeout(connect=patience_s, read=patience_s), 0
        pool = urllib3.PoolManager(
            timeout=timeout,
            retries=urllib3.Retry(
                total=tries,
                connect=min(tries, 2),
                backoff_factor=0.2,
                status_forcelist=[500, 502, 503, 504],
            ),
        )
        split = urlsplit(endpoint)
        self.client = S3Client(
            split.netloc,
            access_key=access,
            secret_key=secret,
            region=region,
            secure=split.scheme == "https",
            http_client=pool,
        )
        self._bucket_known = False

    def missing(self) -> str | None:
        """The missing bucket, in words; None if it exists. The first write creates it."""
        with self._errors(""):
            return (
                None
                if self.client.bucket_exists(self.bucket)
                else f"bucket {self.bucket} at {self.endpoint}"
            )

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

    def put(self, key: str, data: Content) -> None:
        with self._errors(key):
            self._ensure_bucket()
            self.client.put_object(
                self.bucket, self.prefix + checked_key(key), io.BytesIO(data), len(data)
            )

    def create(self, key: str, data: Content, digest: str | None = None) -> bool:
        return self.swap(key, data, None, digest) is not None

    def swap(
        self, key: str, data: Content, version: str | None, digest: str | None = None
    ) -> str | None:
        from minio.error import S3Error

        from trainwright.tasks.storage.s3_client import DIGEST

        with self._errors(key):
            self._ensure_bucket()
            try:
                # The public put_object turns If-None-Match into user metadata, and would overwrite.
                headers: dict[str, Any] = (
                    {"If-None-Match": "*"} if version is None else {"If-Match": version}
                )
                if digest is not None:
                    headers[DIGEST] = digest
                written = self.client._put_object(
                    self.bucket, self.prefix + checked_key(key), data, headers
                )
            except S3Error as error:
                if error.code in ("PreconditionFailed", "ConditionalRequestConflict"):
                    return None
                if version is not None and error.code in ("NoSuchKey", "NoSuchObject"):
                    return None  # deleted meanwhile
                raise
        return str(written.http_headers["etag"])

    def put_file(self, key: str, path: Path) -> None:
        with self._errors(key):
            self._ensure_bucket()
            self.client.fput_object(self.bucket, self.prefix + checked_key(key), str(path))

    def get_file(self, key: str, path: Path) -> None:
        with self._errors(key):
            self.client.fget_object(self.bucket, self.prefix + checked_key(key), str(path))

    def delete(self, *keys: str) -> None:
        names = [self.prefix + checked_key(key) for key in keys]
        with self._errors(keys[0] if keys else ""):
            if len(names) == 1:
                self.client.remove_object(self.bucket, names[0])
            else:
                self._delete_together(names)

    def _delete_together(self, names: Sequence[str]) -> None:
        """Delete in one request."""
        from minio.deleteobjects import DeleteObject

        for error in self.client.remove_objects(self.bucket, map(DeleteObject, names)):
            if error.code != "NoSuchKey":
                raise ServiceUnreachable(
                    f"S3 server at {self.endpoint}: {self.bucket}/{error.name} can't be deleted: "
                    f"{error.code}: {error.message}",
                    service="s3",
                    address=self.endpoint,
                )

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
                return list(
                    self.client.list_objects(self.bucket, self.prefix + prefix, recursive=recursive)
                )
            except S3Error as error:
                if error.code == "NoSuchBucket":
                    return []
                raise

    def _ensure_bucket(self) -> None:
        from minio.error import S3Error

        if not self._bucket_known:
            try:
                if not self.client.bucket_exists(self.bucket):
                    self._make_bucket()
            except S3Error as error:
                if error.code not in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
                    raise
            self._bucket_known = True

    def _make_bucket(self) -> None:
        self.client.make_bucket(self.bucket)
        if self.bucket != _DEFAULT_BUCKET:  # a name that a user gave, which may be misspelt
            message = f"there was no bucket {self.bucket} at {self.endpoint}; it is made"
            progress.emit("notice", message=message)

    def _errors(self, key: str) -> _S3Errors:
        return _S3Errors(self, key)


class _S3Errors:
    """Translates the SDK's errors into ours. Messages never contain the secret key."""

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
                    f"{where}: it refused the credentials ({error.code}); "
                    "set TRAINWRIGHT_S3_ACCESS_KEY and TRAINWRIGHT_S3_SECRET_KEY",
                    service="s3",
                    address=self.store.endpoint,
                ) from None
            raise ServiceUnreachable(
                f"{where}: {error.code}: {error.message}", service="s3", address=self.store.endpoint
            ) from error
        if isinstance(error, urllib3.exceptions.HTTPError | MinioException | ConnectionError):
            raise ServiceUnreachable(
                f"{where} can't be reached; start the embedded one with `trainwright up`, or set "
                "TRAINWRIGHT_S3_ENDPOINT to another",
                service="s3",
                address=self.store.endpoint,
            ) from error
