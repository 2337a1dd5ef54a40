"""A run of failures alone names those that pass then, so that no flaky test is hidden."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TESTS = """
from pathlib import Path

def test_flaky():
    before = Path("was-here").exists()
    Path("was-here").touch()
    assert before

def test_wrong():
    assert False

def test_right():
    pass
"""


def test_a_test_that_passes_only_when_it_runs_alone_is_named(tmp_path: Path) -> None:
    (tmp_path / "test_them.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "failed_first", "test_them.py"]
    lines = []
    for more in ([], ["--last-failed", "--last-failed-no-failures", "none"]):
        done = subprocess.run(
            [*command, *more],
            cwd=tmp_path,
            env={"PYTHONPATH": str(Path(__file__).parent)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1
        lines.append([line for line in done.stdout.splitlines() if "PASSED ALONE" in line])
    assert lines == [[], ["FAILED BESIDE OTHERS, PASSED ALONE test_them.py::test_flaky"]]
