"""Where data lies: builtin sets, files, folders of images, in a path or an S3 store.

Covers finding and fetching; what the files hold is read by `formats`. `read` gives the rows as they are, missing values and all,
because validation must see those too; what a model gets is made in `tasks.data`. Everything is held in memory.
"""

from __future__ import annotations

import hashlib
import tempfile
import zipfile
import zlib
from pathlib import Path
from urllib.parse import unquote, urlsplit

from trainwright.tasks import progress
from trainwright.tasks.data import formats
from trainwright.tasks.data.formats import INDEX, Raw
from trainwright.tasks.errors import BadInput
from trainwright.tasks.settings import Settings
from trainwright.tasks.spec.job import DataSpec
from trainwright.tasks.storage.connect import open_store
from trainwright.tasks.storage.objects import checked_key

BUILTIN = ("digits",)
SUFFIXES = (".parquet", ".csv", ".npz", ".npy")


def localized(spec: DataSpec, settings: Settings) -> DataSpec:
    """The spec with a builtin's name or a path on this machine as its uri; what lies in S3 is fetched.

    A version of an object is fetched once, into the folder `data` under TRAINWRIGHT_HOME. Raises BadInput where nothing is
    there, ServiceUnreachable where the server does not answer.
    """
    uri = spec.uri
    if uri.startswith("builtin:"):
        if uri.removeprefix("builtin:") not in BUILTIN:
            raise BadInput(
                f"data.uri: got {uri}; allowed: {', '.join(f'builtin:{name}' for name in BUILTIN)}"
            )
        return spec
    split = urlsplit(uri)
    if split.scheme == "s3":
        path = _fetched(uri, settings)
    elif split.scheme == "file" and split.netloc in ("", "localhost"):
        path = Path(unquote(split.path))
    elif "://" in uri:
        raise BadInput(f"data.uri: got {uri}; allowed: builtin:NAME, s3://…, file://… or a path")
    else:
        path = Path(uri)
    if path.is_dir():
        if not (path / INDEX).is_file():
            raise BadInput(
                f"data.uri: got {uri}, a folder without {INDEX}; allowed: a folder of images with one"
            )
    elif not path.exists():
        raise BadInput(f"data.uri: got {uri}; there is no such file")
    elif path.suffix.lower() not in SUFFIXES:
        raise BadInput(
            f"data.uri: got {uri}; allowed: {', '.join(SUFFIXES)}, or a folder of images with {INDEX}"
        )
    return spec.model_copy(update={"uri": str(path.absolute())})


def _fetched(uri: str, settings: Settings) -> Path:
    """The local copy of the object at an S3 URI, or of the folder of objects."""
    parent, _, name = uri.rstrip("/").rpartition("/")
    if parent in ("s3:", "s3:/") or not name:
        raise BadInput(f"data.uri: got {uri}; allowed: s3://bucket/key")
    store = open_store(parent, settings)
    found = {
        item.key: item
        for item in store.list(name)
        if item.key == name or item.key.startswith(f"{name}/")
    }
    if not found:
        raise BadInput(f"data.uri: got {uri}; there is no such object")
    version = hashlib.sha256(
        repr((store.uri, sorted((i.key, i.size, i.etag) for i in found.values()))).encode()
    )
    cache = settings.home / "data"
    folder = cache / version.hexdigest()[:32]
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".part-", dir=cache) as part:
            whole = Path(part) / "whole"
            done, total = 0, sum(item.size for item in found.values())
            for key, item in found.items():
                (whole / checked_key(key)).parent.mkdir(parents=True, exist_ok=True)
                store.get_file(key, whole / key)
                done += item.size
                progress.emit("fetch", uri=uri, bytes=done, of=total)
            try:
                whole.rename(folder)
            except OSError:
                if not folder.is_dir():  # else another process was first, with the same content
                    raise
    return folder / name


def read(spec: DataSpec) -> Raw:
    """The rows of a source on this machine (see `localized`). Raises BadInput if it cannot be read."""
    import pyarrow as pa

    local = spec.uri
    path = Path(local)
    try:
        if local.startswith("builtin:"):
            return formats.read_digits(spec)
        if path.is_dir():
            return formats.read_images(path, spec.target)
        if path.suffix.lower() == ".npz":
            return formats.read_arrays(path, spec.target)
        return Raw(formats.file_sha256([path]), formats.read_table(path))
    except (
        pa.ArrowException,
        OSError,
        ValueError,
        EOFError,
        MemoryError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise BadInput(
            f"data.uri: got {spec.uri}; it can't be read: {reason or type(error).__name__}"
        ) from error


def content_sha256(spec: DataSpec) -> str:
    """The `sha256` that `read` would give, without reading what the files hold. Raises BadInput as `read` does."""
    return formats.file_sha256(files_of(spec))


def require_content(spec: DataSpec, found: str, validated: str) -> None:
    """Raise BadInput where the content that was found, by its SHA-256, is not what was validated."""
    if found != validated:
        raise BadInput(
            f"data.uri: {spec.uri} has changed since it was validated; --new starts afresh with it"
        )


def files_of(spec: DataSpec) -> list[Path]:
    """The files on this machine that the data lies in, in the order of its checksum; what lies in S3 is fetched."""
    local = spec.uri
    if local.startswith("builtin:"):
        return [formats.digits_path()]
    path = Path(local)
    return formats.image_files(path, spec.target)[1] if path.is_dir() else [path]
