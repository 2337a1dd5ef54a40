"""Every command of docs/benchmarks.md starts."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from doc_pages import BENCHMARKS, ROOT

FOLDER = ROOT / "tests/benchmarks"
COMMANDS = sorted(set(re.findall(r"`(\w+\.py)\b", BENCHMARKS.read_text())))


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_benchmark_says_what_it_measures(name: str) -> None:
    (script,) = FOLDER.rglob(name)
    shown = subprocess.run(
        [sys.executable, str(script), "--help"], capture_output=True, text=True, check=False
    )
    assert shown.returncode == 0, shown.stderr
    assert "usage:" in shown.stdout
