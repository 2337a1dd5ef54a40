"""What the tests of trainings share."""

from __future__ import annotations

from typing import Any

import pytest

from trainwright.tasks import progress


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What is said about progress while the test runs."""
    events: list[dict[str, Any]] = []
    monkeypatch.setattr(progress, "_listeners", [events.append])
    return events
