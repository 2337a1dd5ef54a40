"""Finds and fetches data: built-in sets, files and folders of images, at a path or in S3.

`formats` reads the files. `read` returns the rows unchanged, with missing values, because
validation must see those; `dataset` makes the model's arrays from them. Everything is held in
memory.
"""

from __future__ import annotations

import hashlib
import tempfile
import zipfile
import zlib
from pathlib import Path
from urllib.parse import unquote, urlsplit

from trainwright.estimator.named_file import kind_of_file
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
    """The spec with a local path (or a built-in name) as its URI; fetches data from S3.

    Each version of an object is fetched once, into the folder `data` under TRAINWRIGHT_HOME.
    Raises BadInput if there is no data, ServiceUnreachable if the server does not answer.
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
                f"data.uri: got {uri}, a folder without {INDEX}; "
                f"allowed: a folder of images with {INDEX}"
            )
    elif not path.exists():
        raise BadInput(f"data.uri: got {uri}; there is no such file")
    elif not path.is_file():
        kind = kind_of_file(path.stat().st_mode)
        raise BadInput(f"data.uri: got {uri}, which is {kind}; allowed: a regular file")
    elif path.suffix.lower() not in SUFFIXES:
        raise BadInput(
            f"data.uri: got {uri}; "
            f"allowed: {', '.join(SUFFIXES)}, or a folder of images with {INDEX}"
        )
    return spec.model_copy(update={"uri": str(path.absolute())})


def _fetched(uri: str, settings: Settings) -> Path:
    """The local copy of the object, or the folder of objects, at an S3 URI."""
    parent, _, name = uri.rstrip("/").rpartition("/")
    if not urlsplit(parent).netloc:
        raise BadInput(f"data.uri: got {uri}; allowed: s3://bucket/key")
    store = open_store(parent, settings, field="data.uri")
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
                if not folder.is_dir():  # else another process fetched the same content first
                    raise
    return folder / name


def read(spec: DataSpec) -> Raw:
    """The rows of a local source (see `localized`). Raises BadInput if it can't be read."""
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
    """The `sha256` that `read` would return, without parsing the files. Raises BadInput."""
    return formats.file_sha256(files_of(spec))


def require_content(spec: DataSpec, found: str, validated: str) -> None:
    """Raise BadInput if the content's SHA-256 is not the validated one."""
    if found != validated:
        raise BadInput(
            f"data.uri: {spec.uri} has changed since it was validated; "
            "--new starts a new run with it"
        )


def files_of(spec: DataSpec) -> list[Path]:
    """The local files of the data, in the order in which its digest covers them."""
    local = spec.uri
    if local.startswith("builtin:"):
        return [formats.digits_path()]
    path = Path(local)
    return formats.image_files(path, spec.target)[1] if path.is_dir() else [path]
