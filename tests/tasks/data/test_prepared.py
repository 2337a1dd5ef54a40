"""Prepared data: made once per content, mapped by every process, made again if it is damaged."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

from trainwright.tasks.data import dataset
from trainwright.tasks.data.prepared import prepared
from trainwright.tasks.data.sources import remove_unused
from trainwright.tasks.errors import BadInput, TrainwrightError
from trainwright.tasks.spec.data_spec import DataSpec

ROWS = "a,b,label\n" + "".join(f"{n},{n % 7},{'xy'[n % 2]}\n" for n in range(50))


@pytest.fixture
def table(tmp_path: Path) -> DataSpec:
    (tmp_path / "table.csv").write_text(ROWS)
    return DataSpec(uri=str(tmp_path / "table.csv"))


def folders(home: Path) -> list[Path]:
    return [one for one in (home / "prepared").iterdir() if len(one.name) == 32]


@pytest.mark.parametrize("uri", ["builtin:digits", None])
def test_mapped_arrays_equal_those_in_memory(
    uri: str | None, table: DataSpec, tmp_path: Path
) -> None:
    spec = table if uri is None else DataSpec(uri=uri)
    here = dataset.load(spec)
    for _ in range(2):
        found = prepared(spec, tmp_path / "home")
        assert found.schema == here.schema
        assert list(found.inputs) == list(here.inputs)
        for name, array in found.inputs.items():
            assert isinstance(array, np.memmap)
            assert array.dtype == here.inputs[name].dtype
            assert np.array_equal(array, here.inputs[name])
        assert np.array_equal(found.targets, here.targets)


def test_inputs_may_have_the_names_of_files(tmp_path: Path) -> None:
    arrays = {"targets": np.arange(20.0), "keys": np.ones((20, 2)), "y": np.arange(20) % 2}
    np.savez(tmp_path / "a.npz", **arrays)
    found = prepared(DataSpec(uri=str(tmp_path / "a.npz"), target="y"), tmp_path / "home")
    assert found.inputs["targets"].tolist() == arrays["targets"].tolist()
    assert found.targets.tolist() == arrays["y"].tolist()


def test_unchanged_data_is_not_read_again(table: DataSpec, tmp_path: Path) -> None:
    home = tmp_path / "home"
    prepared(table, home)
    [folder] = folders(home)
    made = (folder / "targets.npy").stat().st_mtime_ns
    path = Path(table.uri)
    state = path.stat()
    path.write_text("x" * state.st_size)  # no longer a table, with the state of before
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert len(prepared(table, home).targets) == 50
    assert (folder / "targets.npy").stat().st_mtime_ns == made


def test_a_copy_elsewhere_and_a_later_time_use_the_same_folder(
    table: DataSpec, tmp_path: Path
) -> None:
    home, copy = tmp_path / "home", tmp_path / "copy.csv"
    prepared(table, home)
    shutil.copy(table.uri, copy)
    prepared(DataSpec(uri=str(copy)), home)
    os.utime(table.uri)
    prepared(table, home)
    assert len(folders(home)) == 1


def test_other_content_or_another_target_is_prepared_apart(table: DataSpec, tmp_path: Path) -> None:
    home = tmp_path / "home"
    prepared(table, home)
    assert prepared(table.model_copy(update={"target": "b"}), home).schema.target == "b"
    with Path(table.uri).open("a") as file:
        file.write("99,1,x\n")
    assert len(prepared(table, home).targets) == 51
    assert len(folders(home)) == 3


@pytest.mark.parametrize("what", ["cut", "removed", "no schema", "half made"])
def test_damaged_data_is_made_again(table: DataSpec, tmp_path: Path, what: str) -> None:
    home = tmp_path / "home"
    prepared(table, home)
    [folder] = folders(home)
    inputs = folder / "inputs-0.npy"
    if what == "cut":
        inputs.write_bytes(inputs.read_bytes()[:150])
    elif what == "removed":
        inputs.unlink()
    elif what == "no schema":
        (folder / "schema.json").write_text("{")
    else:  # a process was killed while it wrote
        folder.rename(folder.with_name(f"{folder.name}.part"))
    found = prepared(table, home)
    assert np.array_equal(found.inputs["inputs"], dataset.load(table).inputs["inputs"])
    assert [one.name for one in (home / "prepared").glob("*.part")] == []


def test_processes_that_need_it_at_once_make_it_once(table: DataSpec, tmp_path: Path) -> None:
    home = tmp_path / "home"
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from trainwright.tasks.data.prepared import prepared\n"
        "from trainwright.tasks.spec.data_spec import DataSpec\n"
        "found = prepared(DataSpec(uri=sys.argv[1]), Path(sys.argv[2]))\n"
        "print(float(found.inputs['inputs'].sum()), 'pandas' in sys.modules)\n"
    )
    asked = [sys.executable, "-c", code, table.uri, str(home)]
    started = [subprocess.Popen(asked, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    answers = {one.communicate()[0] for one in started}
    total = float(dataset.load(table).inputs["inputs"].sum())
    assert answers == {f"{total} False\n"}
    assert len(folders(home)) == 1
    assert list((home / "prepared").glob("*.lock")) == []


def test_a_full_disk_is_one_line_and_leaves_nothing(
    table: DataSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")(10, 10, 700)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    says = r"^TRAINWRIGHT_HOME: the data needs [1-9][\d.,]* [KM]?i?B in .*; 700 B are free$"
    with pytest.raises(TrainwrightError, match=says) as raised:
        prepared(table, tmp_path / "home")
    assert raised.value.exit_code == 1
    assert folders(tmp_path / "home") == []


def test_data_that_nobody_used_for_long_is_removed(table: DataSpec, tmp_path: Path) -> None:
    home = tmp_path / "home"
    prepared(table, home)
    [old] = folders(home)
    [digest] = (home / "prepared" / "digests").iterdir()
    for one in (old, digest):
        os.utime(one, (time.time() - 31 * 86_400,) * 2)
    prepared(DataSpec(uri="builtin:digits"), home)
    [left] = folders(home)
    assert left != old
    assert not digest.exists()


def test_what_is_used_stays(table: DataSpec, tmp_path: Path) -> None:
    home = tmp_path / "home"
    prepared(table, home)
    used = [*folders(home), *(home / "prepared" / "digests").iterdir()]
    for one in used:
        os.utime(one, (time.time() - 31 * 86_400,) * 2)
    prepared(table, home)
    prepared(DataSpec(uri="builtin:digits"), home)
    assert all(one.exists() for one in used)


def test_removing_what_is_unused_may_meet_another_process_that_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long_ago = (time.time() - 31 * 86_400,) * 2
    for name in "abc":
        (tmp_path / (name * 32)).mkdir()
        (tmp_path / (name * 32) / "file").touch()
        os.utime(tmp_path / (name * 32), long_ago)
    listed = list(tmp_path.iterdir())
    shutil.rmtree(listed[0])
    monkeypatch.setattr(Path, "iterdir", lambda _: iter(listed))  # it was there a moment ago
    remove_unused(tmp_path)
    assert not any(one.exists() for one in listed)


def test_a_home_in_which_nothing_can_be_written_is_one_line(
    table: DataSpec, tmp_path: Path
) -> None:
    (tmp_path / "home").touch()
    with pytest.raises(
        BadInput, match=r"^TRAINWRIGHT_HOME: .*: can't be written \(Not a directory"
    ):
        prepared(table, tmp_path / "home")
