"""How far a training is, and what is left of it."""

from __future__ import annotations

from typing import Any

import pytest

from trainwright.tasks.train.record.pace import progress_of


def _recorded(steps: int, epochs: tuple[float, ...] = ()) -> dict[str, Any]:
    """Two ranks, of which the second one is slower, and the durations of the ended epochs."""
    rows = [
        {"step": step, "rank": rank, "epoch": step // 10, "step_time_s": 0.1 * (1 + rank)}
        for step in range(steps)
        for rank in (0, 1)
    ]
    ended = [{"epoch": epoch, "duration_s": took} for epoch, took in enumerate(epochs)]
    return {"newest": rows[-2:], "rows": rows, "epochs": ended}


def test_progress_is_known_from_the_first_step_on() -> None:
    assert progress_of(_recorded(0), 10, 4) is None
    found = progress_of(_recorded(5), 10, 4)
    assert found == {
        "step": 5,
        "steps": 40,
        "epoch": 1,
        "epochs": 4,
        "share": 0.125,
        "left_s": pytest.approx(35 * 0.2),  # at the slower rank's pace
    }


def test_the_rest_takes_as_long_as_the_latest_epochs() -> None:
    found = progress_of(_recorded(25, (9.0, 3.0)), 10, 4)
    assert found is not None
    assert (found["epoch"], found["left_s"]) == (3, pytest.approx(15 * 0.6))
    ended = progress_of(_recorded(45, (9.0,)), 10, 4)  # a batch that was cut makes more steps
    assert ended is not None
    assert (ended["step"], ended["epoch"], ended["left_s"]) == (40, 4, 0.0)
