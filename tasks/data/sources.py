"""Finds and fetches data: built-in sets, files, folders of images or of parquet files; also in S3.

`open_source` opens a table to be read in batches (`table_source`), or arrays and images
(`formats`). `read` returns all rows unchanged and in memory, with missing values, because
validation must see those; `dataset` makes the model's arrays.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from trainwright.estimator.named_file import kind_of_file
from trainwright.estimator.near_names import meant, meant_file
from trainwright.tasks import progress, units
from trainwright.tasks.data import formats
from trainwright.tasks.data.formats import INDEX, Raw
from trainwright.tasks.data.tables.table_source import TableSource, open_table, parquet_files
from trainwright.tasks.errors import BadInput, TrainwrightError
from trainwright.tasks.settings import Settings
from trainwright.tasks.spec.csv_spec import CsvSpec
from trainwright.tasks.spec.data_spec import DataSpec
from trainwright.tasks.storage.connect import open_store
from trainwright.tasks.storage.objects import checked_key

BUILTIN = ("digits",)
_KEPT_DAYS = 30
SUFFIXES = (".parquet", ".csv", ".npz", ".npy")


def localized(spec: DataSpec, settings: Settings) -> DataSpec:
    """The spec with a local path (or a built-in name) as its URI; fetches data from S3.

    Each version of an object is fetched once, into the folder `data` under TRAINWRIGHT_HOME, from
    which it is removed if nobody uses it for `_KEPT_DAYS`.
    Raises BadInput if there is no data, ServiceUnreachable if the server does not answer.
    """
    uri = spec.uri
    if uri.startswith("builtin:"):
        if spec.reader == "model":
            raise BadInput(f"data.uri: got {uri}; allowed with data.reader: model: files")
        builtin = [f"builtin:{name}" for name in BUILTIN]
        if uri not in builtin:
            raise BadInput(
                f"data.uri: got {uri}; allowed: {', '.join(builtin)}{meant(uri, builtin)}"
            )
        return spec
    path = local_path(uri, settings, "data.uri", "builtin:NAME, ")
    if path.is_dir():
        known = (path / INDEX).is_file() or parquet_files(path)
        if spec.reader != "model" and not known:
            raise BadInput(
                f"data.uri: got {uri}, a folder without {INDEX}; "
                f"allowed: a folder of images with {INDEX}, or a folder of parquet files"
            )
    elif spec.reader != "model" and path.suffix.lower() not in SUFFIXES:
        raise BadInput(
            f"data.uri: got {uri}; "
            f"allowed: {', '.join(SUFFIXES)}, or a folder of images with {INDEX} "
            "or of parquet files"
        )
    return spec.model_copy(update={"uri": str(path.absolute())})


def local_path(uri: str, settings: Settings, field: str, also: str = "") -> Path:
    """The local file or folder at a URI; fetched as in `localized` if it is in S3.

    `field` is what messages call the URI, `also` what else they allow. Raises as `localized`.
    """
    split = urlsplit(uri)
    if split.scheme == "s3":
        path = _fetched(uri, settings, field)
    elif split.scheme == "file" and split.netloc in ("", "localhost"):
        path = Path(unquote(split.path))
    elif "://" in uri:
        raise BadInput(f"{field}: got {uri}; allowed: {also}s3://…, file://… or a path")
    else:
        path = Path(uri)
    if not path.exists():
        raise BadInput(f"{field}: got {uri}; there is no such file{meant_file(uri)}")
    whole = path.resolve()
    if whole == whole.parent or whole.parts[1] in ("proc", "sys"):
        raise BadInput(f"{field}: got {uri}, a part of the system; allowed: a folder of data")
    if not path.is_dir() and not path.is_file():
        kind = kind_of_file(path.stat().st_mode)
        raise BadInput(f"{field}: got {uri}, which is {kind}; allowed: a regular file")
    return path


def _fetched(uri: str, settings: Settings, field: str) -> Path:
    """The local copy of the object, or the folder of objects, at an S3 URI."""
    parent, _, name = uri.rstrip("/").rpartition("/")
    if not urlsplit(parent).netloc:
        raise BadInput(f"{field}: got {uri}; allowed: s3://bucket/key")
    store = open_store(parent, settings, field=field)
    found = {
        item.key: item
        for item in store.list(name)
        if item.key == name or item.key.startswith(f"{name}/")
    }
    if not found:
        raise BadInput(f"{field}: got {uri}; there is no such object")
    version = hashlib.sha256(
        repr((store.uri, sorted((i.key, i.size, i.etag) for i in found.values()))).encode()
    )
    cache = settings.home / "data"
    folder = cache / version.hexdigest()[:32]
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        remove_unused(cache)
        with tempfile.TemporaryDirectory(prefix=".part-", dir=cache) as part:
            whole = Path(part) / "whole"
            done, total = 0, sum(item.size for item in found.values())
            require_free(cache, total)
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
    os.utime(folder)
    return folder / name


def remove_unused(cache: Path) -> None:
    """Remove files and folders that nobody used for `_KEPT_DAYS`; they have names of 32 characters.

    Using one sets its time of change.
    """
    oldest = time.time() - _KEPT_DAYS * 86_400
    for one in cache.iterdir() if cache.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):  # another process removed it first
            if len(one.name) != 32 or one.stat().st_mtime >= oldest:
                continue
            if one.is_dir():
                shutil.rmtree(one, ignore_errors=True)
            else:
                one.unlink()


def require_free(folder: Path, size: int, setting: str = "TRAINWRIGHT_HOME") -> None:
    """Raise TrainwrightError if the disk of a folder has no room for so many bytes.

    `setting`: the variable that says where the folder is.
    """
    if (free := shutil.disk_usage(folder).free) < size:
        raise TrainwrightError(
            f"{setting}: the data needs {units.size(size)} in {folder}; {units.size(free)} are free"
        )


def read(spec: DataSpec) -> Raw:
    """The rows of a local source (see `localized`). Raises BadInput if it can't be read."""
    with readable(spec):
        source = open_source(spec)
        if isinstance(source, TableSource):
            return Raw(content_sha256(spec), source.read())
        return source


def open_source(spec: DataSpec) -> TableSource | Raw:
    """A local source (see `localized`): a table to be read in batches, or arrays or images.

    Use it and its batches within `readable`.
    """
    if spec.reader == "model":
        raise BadInput("data.reader: got model; allowed only for a job with a model")
    path = Path(spec.uri)
    if spec.csv != CsvSpec() and path.suffix.lower() != ".csv":
        raise BadInput(f"data.csv: got {spec.uri}; allowed only for a .csv file")
    if spec.uri.startswith("builtin:"):
        return formats.read_digits(spec)
    if (path / INDEX).is_file():
        return formats.read_images(path, spec.target)
    if path.suffix.lower() == ".npz":
        return formats.read_arrays(path, spec.target)
    return table_of(spec)


def table_of(spec: DataSpec) -> TableSource:
    """The table of a local source. Raises ValueError, OSError."""
    path = Path(spec.uri)
    texts = [name for name in (spec.text, spec.series) if name is not None]
    return open_table(path, spec.named_columns, spec.csv, [*texts, *spec.ignore])


@contextlib.contextmanager
def readable(spec: DataSpec) -> Iterator[None]:
    """Inside the block, an error in reading the source becomes BadInput with one line."""
    import pyarrow as pa

    try:
        yield
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
            f"data.uri: got {spec.uri}; it can't be read: "
            f"{' '.join(reason.split()) or type(error).__name__}"
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
    if spec.reader == "model":
        inside = sorted(found for found in path.rglob("*") if found.is_file())
        return inside if path.is_dir() else [path]
    if (path / INDEX).is_file():
        return formats.image_files(path, spec.target)[1]
    return parquet_files(path) if path.is_dir() else [path]
