"""Fixtures of the training tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from trainwright.tasks import progress


@pytest.fixture
def heard() -> Iterator[list[dict[str, Any]]]:
    """The progress events during the test."""
    events: list[dict[str, Any]] = []
    with progress.listening(events.append):
        yield events
