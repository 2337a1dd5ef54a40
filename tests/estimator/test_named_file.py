"""Files that people name are written whole or not at all."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainwright.estimator.errors import BadInput
from trainwright.estimator.named_file import require_space, write_named


@pytest.fixture
def little_space() -> Iterator[None]:
    """The kernel refuses files of more than 1,000 bytes, as if the disk was full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_is_written_and_replaced_and_its_folder_is_created(tmp_path: Path) -> None:
    for content in (b"one", b"two"):
        write_named(tmp_path / "deep" / "file", content)
        assert (tmp_path / "deep" / "file").read_bytes() == content
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["file"]


@pytest.mark.usefixtures("little_space")
def test_a_full_disk_is_reported_and_the_old_file_stays(tmp_path: Path) -> None:
    write_named(tmp_path / "file", b"before")
    with pytest.raises(BadInput, match=r"--out: .*/file: can't be written \(File too large\)"):
        write_named(tmp_path / "file", bytes(2000), "--out")
    with pytest.raises(BadInput, match="can't be written"):
        write_named(tmp_path / "new", bytes(2000))
    with pytest.raises(BadInput, match=r"--out: .*file: can.t be written"):
        require_space(tmp_path / "file", 2000, "--out")
    require_space(tmp_path / "file", 500)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"before")]


def test_a_file_in_the_place_of_the_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match="can't be written"):
        write_named(tmp_path / "file" / "below", b"x")
