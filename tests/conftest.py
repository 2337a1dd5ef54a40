"""What all tests share: no test sees or touches the user's own trainwright."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A trainwright home of the test's own."""
    folder = tmp_path / "home"
    monkeypatch.setenv("TRAINWRIGHT_HOME", str(folder))
    return folder
