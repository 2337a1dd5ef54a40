"""`--no-skips`: CI fails if a test was skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

FILES = {
    "test": "import pytest\n\ndef test_it():\n    pytest.skip('no network')\n",
    "mark": "import pytest\n\n@pytest.mark.skip(reason='no network')\ndef test_it(): pass\n",
    "xfail": "import pytest\n\n@pytest.mark.xfail(reason='no network')\ndef test_it(): assert 0\n",
    "module": "import pytest\n\npytest.skip('no network', allow_module_level=True)\n",
}


def _run(folder: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_made_up.py").write_text(text)
    pytest_command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull]
    return subprocess.run(
        [*pytest_command, "-p", "conftest", "-p", "no:cacheprovider", *options, str(folder)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(HERE)},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("kind", FILES)
def test_a_skip_fails_with_the_option_and_says_why(kind: str, tmp_path: Path) -> None:
    result = _run(tmp_path, FILES[kind], "--no-skips")
    assert result.returncode not in (0, 5), result.stdout
    assert "no network" in result.stdout


def test_without_the_option_a_skip_passes(tmp_path: Path) -> None:
    result = _run(tmp_path, FILES["mark"])
    assert result.returncode == 0
    assert "1 skipped" in result.stdout


def test_a_test_that_passes_still_passes_with_the_option(tmp_path: Path) -> None:
    assert _run(tmp_path, "def test_it(): pass\n", "--no-skips").returncode == 0
