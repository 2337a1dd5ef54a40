"""Fixtures of the training tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from memory_cgroups import limited_cgroup

from trainwright.tasks import progress


@pytest.fixture
def heard() -> Iterator[list[dict[str, Any]]]:
    """The progress events during the test."""
    events: list[dict[str, Any]] = []
    with progress.listening(events.append):
        yield events


@pytest.fixture
def small_memory(tmp_path: Path) -> Iterator[Path]:
    """A cgroup whose processes may hold 700 MB."""
    with limited_cgroup(tmp_path.name, 700) as group:
        yield group
