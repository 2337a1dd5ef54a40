"""The command `export` on runs that it can't export: one line, and the exit code of bad input."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from finished_run import local_path
from stored_run import with_source
from table_run import MODEL, table_run

from trainwright.tasks.runs.run import Run

AS_NOBODY = """
import os, sqlite3, sqlalchemy.dialects.sqlite, sys
from trainwright.tasks.cli import main
from trainwright.tasks.cli.commands import export_command
from trainwright.tasks.cli.screens import console, export_table
from trainwright.tasks.export import export_run
from trainwright.tasks.leases import database, ledger
if os.geteuid() == 0:
    os.seteuid(65534)
main.main()
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return table_run(tmp_path_factory.mktemp("table"))


def refused(run: Run, *program: str, **variables: str) -> str:
    """What the command says of a run. `variables`: of its environment."""
    program = program or ("-m", "trainwright.tasks.cli.main")
    done = subprocess.run(
        [sys.executable, *program, "export", run.uri, "--to", "onnx"],
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
    )
    assert done.returncode != 0
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    return line


def test_a_source_whose_package_is_missing(run: Run, tmp_path: Path) -> None:
    line = refused(with_source(run, tmp_path, f"import no_such_package\n{MODEL}"))
    assert (
        "No module named 'no_such_package' (net.py, line 4); if that is a package, install it here"
        in line
    )


def test_a_damaged_run(run: Run, tmp_path: Path) -> None:
    copy = with_source(run, tmp_path, MODEL)
    weights = local_path(copy, "model/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    assert "model/model.safetensors" in refused(copy)


def test_a_manifest_that_is_damaged(run: Run, tmp_path: Path) -> None:
    copy = with_source(run, tmp_path, MODEL)
    copy.objects.put("manifest.json", b"{")
    line = refused(copy)
    assert "manifest.json: " in line
    assert "restore the file from a copy, or train again with `trainwright run JOB --new`" in line


def test_a_run_of_another_user(run: Run, tmp_path: Path) -> None:
    copy = with_source(run, tmp_path, MODEL)
    folder = local_path(copy, "")
    folder.parent.chmod(0 if os.geteuid() else 0o700)
    try:
        line = refused(copy, "-c", AS_NOBODY)
    finally:
        folder.parent.chmod(0o700)
    assert "may not use it; allowed: files and runs of this user" in line


def test_a_store_that_may_be_read_only_is_refused_before_the_work(run: Run) -> None:
    with tempfile.TemporaryDirectory() as name:  # others may not enter pytest's folders
        folder, home = Path(name, "shared"), Path(name, "home")
        Path(name).chmod(0o755)
        copy = with_source(run, folder, f"import no_such_package\n{MODEL}")
        place = local_path(copy, "")
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        home.mkdir()
        home.chmod(0o777)
        place.chmod(0o555)
        try:
            line = refused(copy, "-c", AS_NOBODY, TRAINWRIGHT_HOME=str(home))
        finally:
            place.chmod(0o755)
    assert "can't be written (Permission denied); let the user" in line
