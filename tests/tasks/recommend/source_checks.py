"""What generated sources of models must pass."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from doc_pages import ROOT


def require_clean(folder: Path, checked: Sequence[str | Path]) -> None:
    """Check a folder's sources with ruff, by the project's rules and alone; some with mypy."""
    config = ["--no-cache", "--config", str(ROOT / "pyproject.toml")]
    cache = ["--cache-dir", str(ROOT / "build" / "mypy")]
    for command in (
        ["ruff", "check", *config, "--ignore", "TID253", str(folder)],
        ["ruff", "check", "--no-cache", "--isolated", str(folder)],
        ["ruff", "format", *config, "--check", str(folder)],
        ["mypy", "--strict", "--config-file", "", *cache, *map(str, checked)],
    ):
        done = subprocess.run(
            [sys.executable, "-m", *command], capture_output=True, text=True, cwd=folder
        )
        assert done.returncode == 0, done.stdout + done.stderr
