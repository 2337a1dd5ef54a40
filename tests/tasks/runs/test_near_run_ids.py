"""A mistyped run id, or a job's name instead of one, gets the id that was probably meant."""

from __future__ import annotations

from pathlib import Path

import doors
import pytest

from trainwright.tasks.errors import BadInput
from trainwright.tasks.runs.artefacts.run_status import Status
from trainwright.tasks.runs.run import resolve

OLD, NEW = "20260101T000001Z-abcdef", "20260102T000001Z-123456"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("20260101T000001Z-abcdeg", f"; did you mean {OLD}?"),
        ("small", f"; did you mean {NEW}?"),
        ("nothing like it", "lists"),
    ],
)
def test_the_error_names_the_run_that_was_probably_meant(
    given: str, meant: str, home: Path
) -> None:
    store = f"file://{home / 'store'}"
    status = Status(state="success", holder="me", started_at="2026", updated_at="2026")
    for name in (OLD, NEW):
        doors.run_at(f"{store}/runs/small/{name}").write(status)
    with pytest.raises(BadInput) as refused:
        resolve(given, doors.settings(), store)
    assert str(refused.value).endswith(meant)
