"""Opens a store by its URI, with the credentials in the settings."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from trainwright.infra.local import s3_access
from trainwright.tasks.errors import BadInput, ServiceUnreachable
from trainwright.tasks.settings import Settings
from trainwright.tasks.storage.folder import FolderStore
from trainwright.tasks.storage.objects import checked_key
from trainwright.tasks.storage.s3 import S3Store

_PORT = r"[1-9]\d{0,3}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d\d|655[0-2]\d|6553[0-5]"
_ENDPOINT = re.compile(rf"https?://([A-Za-z0-9._-]+|\[[0-9a-fA-F:]+\])(:({_PORT}))?/?")


def open_store(
    uri: str, settings: Settings, *, patience_s: float | None = None, field: str = "store"
) -> FolderStore | S3Store:
    """The store at `s3://bucket/prefix` or `file:///folder`. Connects at first use.

    `patience_s`: the store counts as unreachable after this long without an answer, and requests
    are not retried; by default they are. `field` names the URI in errors. Raises BadInput for any
    other URI, ServiceUnreachable if the embedded S3 server was never started.
    """
    split = urlsplit(uri)
    if split.scheme == "file" and split.netloc in ("", "localhost") and split.path:
        folder = Path(unquote(split.path))
        if file := next((one for one in (folder, *folder.parents) if os.path.isfile(one)), None):
            raise BadInput(f"{field}: got {uri!r}; {file} is a file; allowed: a folder")
        return FolderStore(folder)
    if split.scheme != "s3" or not split.netloc:
        raise BadInput(f"{field}: got {uri!r}; allowed: s3://bucket/prefix or file:///folder")
    if not re.match(r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$", split.netloc):
        raise BadInput(
            f"{field}: got {uri!r}; allowed: a bucket's name of 3 to 63 lower-case letters, "
            "digits, . and -, beginning and ending with a letter or digit"
        )
    prefix = split.path.strip("/")
    if prefix:
        checked_key(prefix)
    endpoint, credentials = settings.s3_endpoint, settings.s3_credentials()
    if endpoint is None:
        try:
            embedded = s3_access(settings.home)
        except OSError as error:
            raise ServiceUnreachable(
                "S3 server: none is set up on this machine; start the embedded one with "
                "`trainwright up`, or set TRAINWRIGHT_S3_ENDPOINT, TRAINWRIGHT_S3_ACCESS_KEY and "
                "TRAINWRIGHT_S3_SECRET_KEY",
                service="s3",
                address="127.0.0.1",
            ) from error
        endpoint, credentials = (
            embedded.endpoint,
            credentials or (embedded.access_key, embedded.secret_key),
        )
    if credentials is None:  # another server must not see the embedded server's keys
        raise BadInput(
            "TRAINWRIGHT_S3_ACCESS_KEY, TRAINWRIGHT_S3_SECRET_KEY: not set; "
            "TRAINWRIGHT_S3_ENDPOINT requires them"
        )
    if not _ENDPOINT.fullmatch(endpoint):  # the message omits it: it may contain a password
        raise BadInput(
            "TRAINWRIGHT_S3_ENDPOINT: allowed: http(s)://host:port, without user, password or path"
        )
    return S3Store(split.netloc, prefix, endpoint, *credentials, settings.s3_region, patience_s)
