"""A host's data cache: only the validated content enters it, and damaged content is replaced."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from trainwright.tasks.errors import BadInput
from trainwright.tasks.spec.data_spec import DataSpec
from trainwright.tasks.train.hosts.stage_data import cache_of, keep, look

TEXT = "a,label\n1,yes\n2,no\n"
SHA256 = hashlib.sha256(hashlib.sha256(TEXT.encode()).digest()).hexdigest()
"""the digest of the checksum of its only file"""


def copied(folder: Path, text: str) -> Path:
    """A table, copied into a launch's folder as the launcher does."""
    path = folder / "copy" / "table.csv"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return path


@pytest.fixture
def spec(tmp_path: Path) -> DataSpec:
    """The spec of a table that this machine lacks."""
    return DataSpec(uri=str(tmp_path / "elsewhere" / "table.csv"), target="label")


def test_a_truncated_copy_does_not_enter_the_cache(
    spec: DataSpec, home: Path, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match="differs from the validated content"):
        keep(spec, copied(tmp_path / "cut", TEXT[:-3]), SHA256)
    assert not cache_of(SHA256).exists()
    keep(spec, copied(tmp_path / "whole", TEXT), SHA256)
    assert Path(look(spec, SHA256)).read_text() == TEXT


@pytest.mark.parametrize("there", [TEXT[:-3], TEXT, None])
def test_damaged_data_in_the_cache_is_replaced(
    there: str | None, spec: DataSpec, home: Path, tmp_path: Path
) -> None:
    cache_of(SHA256).mkdir(parents=True)
    if there is not None:
        (cache_of(SHA256) / "table.csv").write_text(there)
    inode = cache_of(SHA256).stat().st_ino
    keep(spec, copied(tmp_path / "whole", TEXT), SHA256)
    found = Path(look(spec, SHA256))
    assert found.parent == cache_of(SHA256)
    assert found.read_text() == TEXT
    assert (cache_of(SHA256).stat().st_ino == inode) == (there == TEXT)


def test_a_folder_of_parquet_files_is_found_whole(home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "launch" / "copy" / "years"
    for year in ("2024", "2025"):
        (folder / year).mkdir(parents=True)
        (folder / year / "rows.parquet").write_bytes(year.encode())
    digests = (hashlib.sha256(year.encode()).digest() for year in ("2024", "2025"))
    sha256 = hashlib.sha256(b"".join(digests)).hexdigest()
    spec = DataSpec(uri=str(tmp_path / "elsewhere" / "years"))
    keep(spec, folder, sha256)
    assert look(spec, sha256) == str(cache_of(sha256) / "years")
    (cache_of(sha256) / "years" / "2025" / "rows.parquet").unlink()
    with pytest.raises(BadInput, match="there is no such file"):
        look(spec, sha256)
