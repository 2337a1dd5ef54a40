"""Small trainings reproduce the recorded losses, splits, metrics and checkpoints.

The comparison is exact if the recording was made with this machine's processor and this version of
torch, else within a relative 1e-3 (see `golden.py`, which makes the recordings).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from golden import (
    CASES,
    MOMENTUM,
    SEARCH,
    SLOW,
    Case,
    command,
    differences,
    observed,
    prepared,
    recorded,
    searched,
    trained,
)
from outside import Outside, folder_of, interrupt, read, wait_until


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Outside:
    """One home for all tests of this file, so that this machine is measured once."""
    return prepared(tmp_path_factory.mktemp("golden") / "place")


@pytest.mark.parametrize("case", CASES, ids=lambda one: one.name)
def test_a_training_matches_its_recording(place: Outside, case: Case) -> None:
    before, exact = recorded(case.name)
    assert differences(before, trained(place, case), exact=exact) == []


def test_a_learning_rate_search_matches_its_recording(place: Outside) -> None:
    before, exact = recorded(SEARCH.name)
    assert differences(before, searched(place), exact=exact) == []


def test_an_interrupted_training_resumes_with_the_same_losses(place: Outside) -> None:
    """Ctrl-C after a checkpoint, then the same command again: each step occurs once."""
    before, exact = recorded(MOMENTUM.name)
    again = command(place, replace(MOMENTUM, devices=SLOW), "interrupted")
    with place.started(*again, "--json") as process:
        wait_until(
            lambda: bool(list(place.store.glob("runs/interrupted/*/checkpoints/step-*"))), process
        )
        stopped = interrupt(process)
    assert stopped.code == 130, stopped
    assert stopped.document()["error"]["kind"] == "interrupted"
    assert stopped.document()["state"] == "interrupted"

    finished = place.done(*again)
    assert finished["run"] == stopped.document()["run"]
    run = folder_of(finished["run"])
    assert 0 < read(run / "result.json")["resumed_from_step"] < before["result"]["steps"]
    now = observed(run)
    for part in ("plan", "steps", "epochs"):
        assert differences(before[part], now[part], exact=exact) == []
    for name in ("metrics", "target_reached", "steps", "noise_scale"):
        assert differences(before["result"][name], now["result"][name], exact=exact) == []
    assert now["checkpoints"]["step"][-1] == before["result"]["steps"]


def test_recordings_are_compared_exactly_or_within_a_tolerance() -> None:
    """The comparison detects another digit, a missing figure and another type."""
    before = {"steps": {"loss": [1.0, 2.0], "accuracy": [0.5]}, "kept": [1, None]}
    near = {"steps": {"loss": [1.0, 2.001], "accuracy": [0.505]}, "kept": [1, None]}
    assert differences(before, before, exact=True) == []
    assert differences(before, near, exact=False) == []
    assert len(differences(before, near, exact=True)) == 2
    for wrong in (
        {"steps": {"loss": [1.0, 2.1], "accuracy": [0.5]}, "kept": [1, None]},
        {"steps": {"loss": [1.0], "accuracy": [0.5]}, "kept": [1, None]},
        {"steps": {"loss": [1.0, 2.0]}, "kept": [1, None]},
        {"steps": {"loss": [1.0, 2.0], "accuracy": [0.5]}, "kept": [1, 0.0]},
        {"steps": {"loss": [1.0, 2.0], "accuracy": [0.5]}, "kept": [1.0, None]},
    ):
        assert len(differences(before, wrong, exact=False)) == 1, wrong
