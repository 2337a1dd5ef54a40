"""What the tests of trainings share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from trainwright.tasks import progress


@pytest.fixture
def heard() -> Iterator[list[dict[str, Any]]]:
    """What is said about progress while the test runs."""
    events: list[dict[str, Any]] = []
    with progress.listening(events.append):
        yield events
