"""The table of a step by kind of action."""

from __future__ import annotations

import pytest

from trainwright.tasks.cli.screens.kind_table import show_kinds
from trainwright.tasks.runs.artefacts.step_kinds import StepByKind


def device(name: str, scale: float, **wait_s: float) -> StepByKind:
    return StepByKind(
        device=name,
        compute_s={"forward": 0.001 * scale, "backward": 0.003 * scale},
        wait_s=wait_s,
        sent_bytes={"sum": 4096.0 * scale},
    )


def shown(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_predicted_stands_beside_measured_in_one_unit(capsys: pytest.CaptureFixture[str]) -> None:
    predicted = [device("a", 1.0, agree=0.002), device("b", 2.0)]
    measured = [device("a", 2.0, sum=0.004).model_dump(), device("b", 2.0).model_dump()]
    show_kinds(predicted, measured)
    lines = shown(capsys)
    for row in (
        "computes, ms 6 8",
        "forward 1.5 2",
        "backward 4.5 6",
        "waits, ms 1 2",
        "agree 1 0",
        "sum 0 2",
        "sends, KiB 6 8",
    ):
        assert row in lines
    assert not any(line.startswith(("gather", "update")) for line in lines)


def test_a_plan_has_no_measured_column_and_an_old_one_no_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_kinds([device("a", 1.0)])
    assert "computes, ms 4" in shown(capsys)
    show_kinds([])
    show_kinds([], [])
    assert shown(capsys) == []


def test_a_run_that_was_planned_by_an_earlier_version_shows_what_was_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_kinds([], [device("a", 1.0)])
    assert "computes, ms - 4" in shown(capsys)
