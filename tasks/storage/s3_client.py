"""The minio SDK's client, which also accepts the SHA-256 of the data in a header.

`s3` imports this module when it connects.
"""

from __future__ import annotations

from typing import Any

from minio import Minio  # noqa: TID253 - this module is only imported to connect

DIGEST = "x-amz-content-sha256"


class S3Client(Minio):  # type: ignore[misc]  # the SDK is not followed
    """Does not compute a digest that the headers contain already.

    Overrides a private method of the SDK. If a later SDK renames it, the digest is just computed
    again.
    """

    def _build_headers(
        self, host: str, headers: Any = None, body: Any = None, creds: Any = None
    ) -> Any:
        known = headers.get(DIGEST) if headers else None
        if known is None:
            return super()._build_headers(host, headers, body, creds)
        built, date = super()._build_headers(host, headers, None, creds)
        return {**built, DIGEST: known, "Content-Length": str(len(body))}, date
